"""Reading parallel text: what is kept, what is dropped, and the sentence of every error."""

import gzip
import io
import os
import stat
import sys

import pytest

from deepfast.files import DataError, write_atomically
from deepfast.mt.data import ParallelText, read_lines, read_parallel
from deepfast.mt.data.text import read_standard_input, write_lines


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "train.en", tmp_path / "train.de"


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_file_a_pipe_and_standard_input_are_read_alike(tmp_path, monkeypatch, name):
    """Gzip is recognised by its content."""
    lines = ["Grüße", "", "zwei\x0cdrei"]
    write_lines(tmp_path / name, lines)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x1f\x8b") == (name == "text.gz")
    assert read_lines((tmp_path / name).rename(tmp_path / "other.gz")) == lines
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert read_lines(f"/dev/fd/{reader}") == lines
    os.close(reader)
    for given, read in ((content, lines), (b"\xef\xbb\xbfa\r\nb\n", ["a", "b"]), (b"", [])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert read_standard_input() == read
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="expected text, got a closed stream"):
        read_standard_input()


@pytest.mark.parametrize(
    ("source", "target", "pairs", "dropped"),
    [
        ("one\n two \n", "eins\nzwei\r\n", [(1, "one", "eins"), (2, "two", "zwei")], 0),
        # Only line feeds end a line.
        ("a\u2028b\nc\x0cd\x85e\n", "x\ny", [(1, "a\u2028b", "x"), (2, "c\x0cd\x85e", "y")], 0),
        # A byte order mark is no text.
        ("\ufeffa\n\nc\nd\n", "\ufeffA\nB\n  \nD\n", [(1, "a", "A"), (4, "d", "D")], 2),
        # Nor are characters that show nothing, or a tag; beside text they stay.
        ("\u2764\ufe0f\n\u200b\nc\n", "A\nB\n\u00ad\ufeff\n", [(1, "\u2764\ufe0f", "A")], 2),
        ("<fr> a\n<de>\n<it>\n", "A\nB\nC\n", [(1, "<fr> a", "A"), (3, "<it>", "C")], 1),
    ],
    ids=repr,
)
def test_pairs_in_file_order(paths, source, target, pairs, dropped):
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(content.encode())
    text = ParallelText(*paths, tags=["<fr>", "<de>"])
    assert list(text) == list(text) == pairs
    assert text.dropped == dropped


LINES = gzip.compress(b"".join(b"line %d\n" % i for i in range(999)), mtime=0)


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        (b"a\nb\nc\n", b"A\nB\n", r"as many lines in \S+\.en as in \S+\.de, got 3 and 2$"),
        *((text, text, "at least one sentence pair in") for text in (
            b"", b"\n\n", "\u200b\n\ufeff\n".encode())),
        (b"good\nalso good\nb\xe4d\n", b"1\n2\n3\n",
         r"train\.en:3: expected UTF-8, got byte 0xe4 at column 2"),
        (None, b"", r"train\.en: there is no such file"),
        (..., b"", r"train\.en: expected a file, got a folder"),
        (LINES[:-6], b"", r"train\.en: .* damaged or cut short"),
        (LINES[:20] + b"\0\0\0\0" + LINES[24:], b"", r"train\.en: .* damaged or cut short"),
    ],
    ids=repr,
)  # fmt: skip
def test_refused_with_a_sentence(paths, source, target, sentence):
    paths[1].write_bytes(target)
    if source is ...:
        paths[0].mkdir()
    elif source is not None:
        paths[0].write_bytes(source)
    with pytest.raises(DataError, match=sentence):
        read_parallel(*paths)


def test_write_atomically(tmp_path, monkeypatch):
    path = tmp_path / "out"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    (tmp_path / "touched").touch()
    # The file is as readable as any other new file.
    assert len({stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}) == 1
    for folder in ("touched", "absent"):
        with pytest.raises(DataError, match=rf"{folder}/out: cannot be written \(N"):
            write_atomically(tmp_path / folder / "out", b"new")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DataError, match="disk full"):
        write_atomically(path, b"other")
    assert path.read_bytes() == b"new"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "touched"}
