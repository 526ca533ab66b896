"""Parallel text in two files: line i of one is the translation of line i of the other."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import os
import sys
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from deepfast.files import DataError, written

# No UTF-8 text starts with these two bytes: the second cannot follow the first.
GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"
INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Zs")
"""Unicode's categories of controls, of characters without width, and of separators."""


class ParallelText:
    """The pairs of two files with text on both sides, in file order. Each loop reads the files.

    White space, control characters and characters without width, such as U+200B, are no text.

    Args:
        source, target: UTF-8 text files, plain or gzip.
        tags: language tags. One of them alone is no text.

    Attributes:
        dropped: how many pairs the last loop dropped.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        tags: Sequence[str] = (),
    ):
        self.source, self.target, self.tags = Path(source), Path(target), tuple(tags)
        self.dropped = 0

    def __iter__(self) -> Iterator[tuple[int, str, str]]:
        """(number of the line, source, target), white space at the ends removed.

        Raises:
            DataError: a file cannot be read, the line counts differ, or no pair has text.
        """
        number = dropped = 0
        for number, left, right in aligned(self.source, self.target):
            left, right = left.strip(), right.strip()
            if left not in self.tags and _shows(left) and _shows(right):
                yield number, left, right
            else:
                dropped += 1
        self.dropped = dropped
        if dropped == number:
            raise DataError(
                f"expected at least one sentence pair in {self.source} and {self.target}, got "
                f"{number} lines, of which none has text on both sides"
            )

    @cached_property
    def digest(self) -> str:
        """Equal for files with equal content."""
        return " ".join(_digest(path) for path in (self.source, self.target))


def _shows(line: str) -> bool:
    """Whether a character is visible."""
    return any(unicodedata.category(character) not in INVISIBLE for character in line)


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():
        # A pipe cannot be read twice.
        raise DataError(f"{path}: expected a file to train on, got something else")
    with opened(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_parallel(
    source: str | os.PathLike[str], target: str | os.PathLike[str], tags: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The (source, target) pairs of a `ParallelText`, in memory."""
    return [(left, right) for _, left, right in ParallelText(source, target, tags)]


def aligned(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> Iterator[tuple[int, str, str]]:
    """(number, line, line) of two files, of which each line belongs to the other's.

    Raises:
        DataError: a file cannot be read, or the line counts differ.
    """
    sides = lines(source), lines(target)
    for number, (left, right) in enumerate(itertools.zip_longest(*sides), 1):
        if left is None or right is None:
            more = number + sum(1 for side in sides for _ in side)
            counts = (number - 1, more) if left is None else (more, number - 1)
            raise DataError(
                f"expected as many lines in {source} as in {target}, got {counts[0]} and "
                f"{counts[1]}"
            )
        yield number, left, right


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or gzip, without their ends.

    Gzip is recognised by content, not by name. Only LF and CRLF end a line: a form feed or U+2028
    inside a sentence would otherwise shift one side of a parallel text against the other.

    Raises:
        DataError: the file is missing, unreadable, damaged gzip, or not UTF-8 (names the line).
    """
    with opened(path) as stream:
        yield from _lines(stream, os.fspath(path))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """A file to read.

    Raises:
        DataError: it is missing or cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            yield stream
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: expected a file, got a folder") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """All `lines` of a file."""
    return list(lines(path))


def read_standard_input() -> list[str]:
    """The lines of standard input, as `read_lines` reads a file.

    Raises:
        DataError: standard input is closed, damaged gzip, or not UTF-8 (names the line).
    """
    if sys.stdin is None:
        raise DataError("standard input: expected text, got a closed stream")
    # Read everything first: on a slow pipe `peek` may see only the first byte of the gzip mark.
    content = io.BytesIO(sys.stdin.buffer.read())
    return list(_lines(io.BufferedReader(content), "standard input"))


def _lines(stream: io.BufferedReader, name: str) -> Iterator[str]:
    """The decoded lines of a stream; ``name`` is what errors call it."""
    # Without a seek: a pipe (`<(zcat ...)`) cannot be rewound.
    zipped = stream.peek(2)[:2] == GZIP_MAGIC
    number = 0
    try:
        for number, line in enumerate(gzip.GzipFile(fileobj=stream) if zipped else stream, 1):
            if number == 1:
                line = line.removeprefix(UTF8_MARK)
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(
            f"{name}:{number}: expected UTF-8, got byte 0x{bad:02x} at column "
            f"{error.start + 1} ({error.reason})"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: the gzip data is damaged or cut short ({error})") from error


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Writes a UTF-8 text file atomically, one line each; gzip where the name ends in .gz.

    Raises:
        DataError: see `deepfast.files.written`.
    """
    encoded = (f"{line}\n".encode() for line in lines)
    with written(path) as stream:
        if os.fspath(path).endswith(".gz"):
            # Without a time stamp and a name the same text gives the same file.
            with gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as zipped:
                zipped.writelines(encoded)
        else:
            stream.writelines(encoded)
