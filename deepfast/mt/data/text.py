"""Parallel text from two files: line i of one is the translation of line i of the other."""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepfast.files import DataError, write_atomically

# No UTF-8 text starts with these two bytes: the second cannot follow the first.
GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"

# White space, control characters and Unicode's Default_Ignorable_Code_Point, such as the zero-width
# space and the variation selectors, and what sentencepiece takes for a space: U+2581 and U+FFFD.
# Normalisation leaves nothing of most of them.
UNSEEN = (
    r"\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2581\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\ufffd"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)


@dataclass
class Dropped:
    """How many sentence pairs were dropped, by reason, and where each reason first occurred."""

    empty: int = 0
    """Pairs with no text on at least one side."""
    too_long: int = 0
    """Pairs with a side that is longer than the limit."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> place of its first occurrence, such as `train.en:17`."""

    def add(self, reason: str, place: str) -> None:
        """Count one pair; `reason` is `empty` or `too_long`."""
        setattr(self, reason, getattr(self, reason) + 1)
        self.first.setdefault(reason, place)

    @property
    def total(self) -> int:
        return self.empty + self.too_long

    def __add__(self, other: Dropped) -> Dropped:
        """The sum of two passes over the same pairs; `self` is the first pass."""
        counts = self.empty + other.empty, self.too_long + other.too_long
        return Dropped(*counts, other.first | self.first)

    def __str__(self) -> str:
        counts = (("empty", self.empty), ("too long", self.too_long))
        parts = [
            f"{count} {name} (first at {self.first[name.replace(' ', '_')]})"
            for name, count in counts
            if count
        ]
        noun = "pair" if self.total == 1 else "pairs"
        return f"{self.total} {noun} dropped" + (": " + ", ".join(parts) if parts else "")


@dataclass(frozen=True)
class ParallelText(Sequence[tuple[str, str]]):
    """The non-empty pairs of two files, in file order."""

    source_path: Path
    target_path: Path
    pairs: list[tuple[str, str]]
    """(source, target), white space at the ends removed."""
    line_numbers: list[int]
    """The line of each pair, counted from 1; dropped pairs make it differ from the index."""
    lines: int
    """Lines in each file."""
    dropped: Dropped

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]

    @property
    def sources(self) -> list[str]:
        return [source for source, _ in self.pairs]

    @property
    def targets(self) -> list[str]:
        return [target for _, target in self.pairs]

    def place(self, index: int) -> str:
        """`file:line` of the source of pair `index`, for messages."""
        return f"{self.source_path}:{self.line_numbers[index]}"


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzip, without their ends.

    Gzip is recognised by content, not by name. Only LF and CRLF end a line: a form feed or U+2028
    inside a sentence would otherwise shift one side of a parallel text against the other.

    Raises:
        DataError: the file is missing, unreadable, damaged gzip, or not UTF-8 (names the line).
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            return _lines(stream, str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: expected a text file, got a folder") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_standard_input() -> list[str]:
    """The lines of standard input, as `read_lines` reads a file.

    Raises:
        DataError: standard input is closed, damaged gzip, or not UTF-8 (names the line).
    """
    if sys.stdin is None:
        raise DataError("standard input: expected text, got a closed stream")
    # Read everything first: on a slow pipe `peek` may see only the first byte of the gzip mark.
    content = io.BytesIO(sys.stdin.buffer.read())
    return _lines(io.BufferedReader(content), "standard input")


def _lines(stream: io.BufferedReader, name: str) -> list[str]:
    """The decoded lines of a stream; ``name`` is what errors call it."""
    # Without a seek: a pipe (`<(zcat ...)`) cannot be rewound.
    zipped = stream.peek(2)[:2] == GZIP_MAGIC
    lines = []
    try:
        for number, line in enumerate(gzip.GzipFile(fileobj=stream) if zipped else stream, 1):
            if number == 1:
                line = line.removeprefix(UTF8_MARK)
            lines.append(line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(
            f"{name}:{number}: expected UTF-8, got byte 0x{bad:02x} at column "
            f"{error.start + 1} ({error.reason})"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: the gzip data is damaged or cut short ({error})") from error
    return lines


def read_aligned(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> tuple[list[str], list[str]]:
    """The lines of two files, of which each line belongs to the other's.

    Raises:
        DataError: a file cannot be read, or the line counts differ.
    """
    lines = read_lines(source), read_lines(target)
    if len(lines[0]) != len(lines[1]):
        raise DataError(
            f"expected as many lines in {source} as in {target}, got {len(lines[0])} and "
            f"{len(lines[1])}"
        )
    return lines


def read_parallel(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, tags: Sequence[str] = ()
) -> ParallelText:
    """Read two aligned files; pairs with an empty side are dropped, counted and reported.

    A side is empty if all its characters are white space or show nothing, such as U+200B.

    Args:
        tags: language tags. One of them in front of a source is not text.

    Returns:
        A sequence of (source, target) strings. It also holds the files, the line of each pair and
        what was dropped.

    Raises:
        DataError: a file cannot be read, the line counts differ, or no pair is left.
    """
    source, target = Path(source), Path(target)
    source_lines, target_lines = read_aligned(source, target)
    pairs, numbers, dropped = [], [], Dropped()
    tag = "|".join(map(re.escape, tags))
    no_source, no_target = re.compile(f"({tag})?[{UNSEEN}]*"), re.compile(f"[{UNSEEN}]*")
    for number, (left, right) in enumerate(zip(source_lines, target_lines, strict=True), 1):
        left, right = left.strip(), right.strip()
        if no_source.fullmatch(left):
            dropped.add("empty", f"{source}:{number}")
        elif no_target.fullmatch(right):
            dropped.add("empty", f"{target}:{number}")
        else:
            pairs.append((left, right))
            numbers.append(number)
    if not pairs:
        raise DataError(
            f"expected at least one sentence pair in {source} and {target}, got "
            f"{len(source_lines)} lines, of which none has text on both sides"
        )
    return ParallelText(source, target, pairs, numbers, len(source_lines), dropped)


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write a UTF-8 text file atomically, one line each; gzip where the name ends in .gz.

    Raises:
        DataError: see `write_atomically`.
    """
    content = "".join(f"{line}\n" for line in lines).encode("utf-8")
    if os.fspath(path).endswith(".gz"):
        # Without a time stamp the same text gives the same file.
        content = gzip.compress(content, mtime=0)
    write_atomically(path, content)
