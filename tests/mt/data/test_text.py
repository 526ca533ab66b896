"""Reading parallel text: what is kept, what is dropped, and the sentence of every error."""

import gzip
import io
import os
import stat
import sys

import pytest

from deepfast.files import DataError, write_atomically
from deepfast.mt.data import Dropped, ParallelText, read_lines, read_parallel
from deepfast.mt.data.text import read_standard_input, write_lines


@pytest.fixture
def files(tmp_path):
    """Writes two files and returns their paths."""

    def write(source: bytes, target: bytes):
        paths = tmp_path / "train.en", tmp_path / "train.de"
        for path, content in zip(paths, (source, target), strict=True):
            path.write_bytes(content)
        return paths

    return write


def test_pairs_in_file_order_without_outer_space(files):
    text = ParallelText(*files(b"one\n two \n", b"eins\nzwei\r\n"))
    assert list(text) == list(text) == [(1, "one", "eins"), (2, "two", "zwei")]
    assert read_parallel(text.source, text.target) == [("one", "eins"), ("two", "zwei")]
    assert str(text.dropped) == "0 pairs dropped"


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_gzip_is_recognised_by_content(tmp_path, name):
    lines = ["Grüße", "", "zwei"]
    write_lines(tmp_path / name, lines)
    assert read_lines(tmp_path / name) == lines
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == (name == "text.gz")
    (tmp_path / name).rename(tmp_path / "other.gz")
    assert read_lines(tmp_path / "other.gz") == lines


def test_reads_a_pipe(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"hello\nworld\n")
    os.close(writer)
    assert read_lines(f"/dev/fd/{reader}") == ["hello", "world"]
    os.close(reader)


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        # Only line feeds end a line.
        ("a\u2028b\nc\x0cd\x85e\n", "x\ny", [("a\u2028b", "x"), ("c\x0cd\x85e", "y")]),
        # A byte order mark is no text.
        ("\ufeffone\n", "\ufeffeins\n", [("one", "eins")]),
    ],
)
def test_what_is_a_line(files, source, target, pairs):
    assert read_parallel(*files(source.encode(), target.encode())) == pairs


def test_empty_lines_are_dropped_and_counted(files):
    source, target = files(b"a\n\nc\nd\n", b"A\nB\n  \nD\n")
    text = ParallelText(source, target)
    for _ in range(2):
        assert list(text) == [(1, "a", "A"), (4, "d", "D")]
        assert text.dropped == Dropped({"empty": 2}, {"empty": f"{source}:2"})
        assert str(text.dropped) == f"2 pairs dropped: 2 empty (first at {source}:2)"
    text = ParallelText(*files(b"a\nb\n", b"\nB\n"))
    assert [number for number, *_ in text] == [2]
    assert text.dropped.first["empty"] == f"{target}:1"


UNSEEN = ["\u200b", " \ufeff", "\ufe0f", "\U000e0100", "\u00ad\u2060", "\u2581", "\ufffd", "\x07"]


@pytest.mark.parametrize("line", UNSEEN)
def test_a_line_of_characters_that_show_nothing_is_empty(files, line):
    """Beside text such characters stay, such as the variation selector of an emoji."""
    source = f"\u2764\ufe0f\nb\n<de> {line}\nd\n<de> a\n".encode()
    target = f"A\n{line}\nC\nD\nE\n".encode()
    text = ParallelText(*files(source, target), tags=["<fr>", "<de>"])
    assert list(text) == [(1, "\u2764\ufe0f", "A"), (4, "d", "D"), (5, "<de> a", "E")]
    assert text.dropped.counts == {"empty": 2}
    # Without tags this is text.
    assert len(read_parallel(*files(b"<de>\n", b"A\n"))) == 1


LINES = gzip.compress(b"".join(b"line %d\n" % i for i in range(999)), mtime=0)


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        (b"a\nb\nc\n", b"A\nB\n", r"as many lines in \S+\.en as in \S+\.de, got 3 and 2$"),
        (b"a\n", b"A\nB\nC\n", r"as many lines in \S+\.en as in \S+\.de, got 1 and 3$"),
        *((text, text, "at least one sentence pair in") for text in (
            b"", b"\n\n", "\u200b\n\ufeff\n".encode())),
        (b"good\nalso good\nb\xe4d\n", b"1\n2\n3\n",
         r"train\.en:3: expected UTF-8, got byte 0xe4 at column 2"),
        (None, b"", r"train\.en: there is no such file"),
        (..., b"", r"train\.en: expected a text file, got a folder"),
        (LINES[:-6], b"", r"train\.en: .* damaged or cut short"),
        (LINES[:20] + b"\0\0\0\0" + LINES[24:], b"", r"train\.en: .* damaged or cut short"),
    ],
    ids=repr,
)  # fmt: skip
def test_refused_with_a_sentence(files, tmp_path, source, target, sentence):
    paths = files(b"" if source in (None, ...) else source, target)
    if source in (None, ...):
        paths[0].unlink()
    if source is ...:
        paths[0].mkdir()
    with pytest.raises(DataError, match=sentence):
        read_parallel(*paths)


def test_write_atomically(tmp_path):
    path = tmp_path / "out"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "touched").touch()
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert len(modes) == 1, "the file is as readable as any other new file"


def test_write_atomically_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DataError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("folder", ["file", "absent"])
def test_what_cannot_be_written_is_one_sentence(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"{folder}/out: cannot be written \(N"):
        write_atomically(tmp_path / folder / "out", b"new")


def test_standard_input_is_read_like_a_file(tmp_path, monkeypatch):
    for content in (b"\xef\xbb\xbfa\r\nb\x0cc", gzip.compress(b"a\n\nb\n"), b"", b"\x1f"):
        (tmp_path / "text").write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_standard_input() == read_lines(tmp_path / "text")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="expected text, got a closed stream"):
        read_standard_input()
