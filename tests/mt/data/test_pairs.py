"""Pairs as ids in files: what is read is what was encoded, written once for all processes."""

import errno
import multiprocessing
import os

import numpy as np
import pytest

from deepfast.files import DataError
from deepfast.mt.data import Pairs, ParallelText, Vocabulary, pairs, prepare

LINES = [
    ("<de> One 1 two", "Eins ZWEI"), ("\u200b", "Nichts"), ("<de> two two two", "drei"),
    ("<de> two\x0bone\x1ctwo", "eins"), ("<de> ☃", "zwei ☃ drei"),
] * 3  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary():
    text = ["one two 1", "eins zwei drei", "One Two", "Eins Zwei Drei"] * 9
    return Vocabulary.train(text, 60, at_most=True, tags=["<de>"])


@pytest.fixture
def text(tmp_path):
    sides = zip(*LINES, strict=True)
    paths = []
    for name, lines in zip(("a.en", "a.de"), sides, strict=True):
        paths.append(tmp_path / name)
        paths[-1].write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return ParallelText(*paths, tags=["<de>"])


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("at_once", [2, 1000])
def test_what_is_read_is_what_was_encoded(
    text, vocabulary, tmp_path, monkeypatch, at_once, lowercase
):
    monkeypatch.setattr(pairs, "AT_ONCE", at_once)
    prepare(text, vocabulary, tmp_path / "cache", lowercase=lowercase)
    found = prepare(text, vocabulary, tmp_path / "cache", lowercase=lowercase)
    kept = [(source, target) for source, target in LINES if source != "\u200b"]
    if lowercase:
        kept = [(source.lower(), target.lower()) for source, target in kept]
    wanted = vocabulary.encode_pairs(kept)
    assert found.dropped == 3
    assert (found.place(0), found.place(1)) == (f"{text.source}:1", f"{text.source}:3")
    assert isinstance(found.target.ids, np.memmap)
    assert found.target.ids.dtype == np.uint16
    for one in (found, Pairs.of(wanted)):
        assert [(list(source), list(target)) for source, target in one] == wanted
        assert one.unknown == sum(side.count(1) for pair in wanted for side in pair) > 0


def test_other_text_vocabulary_or_case_is_another_folder(text, vocabulary, tmp_path):
    cache = tmp_path / "cache"
    other = Vocabulary.train(["one two eins zwei drei 1 One"] * 9, 40, at_most=True)
    vocabularies = vocabulary, other, vocabulary.with_target(other)
    digests = {prepare(text, v, cache).digest for v in vocabularies}
    digests.add(prepare(text, vocabulary, cache, lowercase=True).digest)
    text.target.write_text(text.target.read_text("utf-8").replace("drei", "zwei"), "utf-8")
    text = ParallelText(text.source, text.target, text.tags)
    digests.add(prepare(text, vocabulary, cache).digest)
    copies = [side.rename(f"{side}.copy") for side in (text.source, text.target)]
    moved = prepare(ParallelText(*copies, text.tags), vocabulary, cache)
    digests.add(moved.digest)
    assert moved.place(1) == f"{copies[0]}:3"
    assert len(digests) == 5 == len([path for path in cache.iterdir() if path.is_dir()])


def test_what_a_killed_process_left_and_damage_and_a_full_disk(
    text, vocabulary, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    folder = cache / prepare(text, vocabulary, cache).digest
    folder.rename(cache / f".{folder.name}.part")
    prepare(text, vocabulary, cache)
    assert {path.name for path in cache.iterdir()} == {folder.name, f".{folder.name}.lock"}
    os.truncate(folder / "target.ids", 8)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pairs.SentenceWriter, "add", full)
    (tmp_path / "file").touch()
    for name, told in (
        ("cache", f"{folder}: the ids of a text are damaged"),
        ("file", "file: cannot be made"),
        ("full", r"full/.*: cannot be written \(No space left on device\)"),
    ):
        with pytest.raises(DataError, match=told):
            prepare(text, vocabulary, tmp_path / name)
    assert not [path for path in (tmp_path / "full").iterdir() if path.is_dir()]


def _prepare(arguments):
    paths, vocabulary, cache = arguments
    found = prepare(ParallelText(*paths), Vocabulary.from_bytes(vocabulary), cache)
    return os.getpid(), found.source.ids.tolist(), os.stat(found.source.ids.filename).st_ino


def test_processes_write_a_text_once(text, vocabulary, tmp_path):
    given = (text.source, text.target), vocabulary.to_bytes(), tmp_path / "cache"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(_prepare, [given] * 4, chunksize=1)
    assert len({(tuple(ids), inode) for _, ids, inode in found}) == 1
