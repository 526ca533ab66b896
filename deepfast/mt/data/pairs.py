"""Sentence pairs as ids in flat arrays: in files that all processes of a machine share, or in
memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from deepfast.files import DataError, make_folder, sync
from deepfast.mt.data.text import ParallelText
from deepfast.mt.data.vocabulary import Vocabulary, lower
from deepfast.mt.ids import UNK

Pair = tuple[Any, Any]
"""The ids of both sides, as lists or arrays."""

ABOUT = "about.json"
AT_ONCE = 10_000
"""Sentence pairs that are encoded at a time."""
FORM = 2
"""The form of the files: what is written in another form has another name."""


class Sentences(NamedTuple):
    """The ids of all sentences of a side, one after the other."""

    ids: np.ndarray
    starts: np.ndarray
    """(N + 1,) int64: where each sentence starts, and where the last one ends."""

    def sentence(self, index: int) -> np.ndarray:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int32."""
        # int32 at once: numpy.diff would make a copy in int64.
        return np.subtract(self.starts[1:], self.starts[:-1], dtype=np.int32, casting="unsafe")

    def part(self, first: int, last: int) -> Sentences:
        """The sentences from ``first`` to before ``last``, in memory."""
        starts = self.starts[first : last + 1]
        return Sentences(np.asarray(self.ids[starts[0] : starts[-1]]), starts - starts[0])

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Sentences:
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(rows), np.int64, starts[-1]), starts)


class Pairs(Sequence[tuple[np.ndarray, np.ndarray]]):
    """N sentence pairs. Pair i is (source ids, target ids), without bos and eos.

    Attributes:
        source, target: all `Sentences` of a side.
        dropped: how many pairs without text the files had besides them.
        unknown: how many of the ids are unk.
    """

    def __init__(self, source: Sentences, target: Sentences):
        self.source, self.target = source, target
        self.dropped = self.unknown = 0
        self._text: ParallelText | None = None

    @classmethod
    def of(cls, pairs: Iterable[Pair], text: ParallelText | None = None) -> Pairs:
        """Pairs in memory, of a text that says where each of them stands."""
        sources, targets = zip(*pairs, strict=True) if (pairs := list(pairs)) else ((), ())
        made = cls(Sentences.of(sources), Sentences.of(targets))
        made.unknown = sum(int((side.ids == UNK).sum()) for side in (made.source, made.target))
        made._text = text
        return made

    @classmethod
    def open(cls, folder: Path, text: ParallelText) -> Pairs:
        """The pairs of a text that `prepare` has written, as files in memory."""
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        opened = cls(*(_sentences(folder, side, kind) for side, kind in about["dtypes"].items()))
        opened.dropped, opened.unknown = about["dropped"], about["unknown"]
        opened.digest, opened._text = folder.name, text
        return opened

    def __len__(self) -> int:
        return len(self.source.starts) - 1

    def __getitem__(self, index):
        return self.source.sentence(index), self.target.sentence(index)

    def place(self, index: int) -> str:
        """`file:line` of the source of a pair, for messages."""
        if self._text is None:
            return f"example {index}"
        number, *_ = next(itertools.islice(self._text, index, None))
        return f"{self._text.source}:{number}"

    @cached_property
    def digest(self) -> str:
        """Equal for equal pairs."""
        found = hashlib.sha256()
        for array in (*self.source, *self.target):
            found.update(array.astype(np.int64).tobytes())
        return found.hexdigest()[:16]


def _sentences(folder: Path, name: str, dtype: str) -> Sentences:
    """What a `SentenceWriter` has written."""
    ids, starts = _open(folder / f"{name}.ids", dtype), _open(folder / f"{name}.starts", "int64")
    if not len(starts) or starts[-1] != len(ids):
        raise DataError(f"{folder}: the ids of a text are damaged: remove this folder")
    return Sentences(ids, starts)


def _open(path: Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """A file or a folder in a cache: made under a lock, and renamed when it is whole, so any number
    of processes may ask for it at once.

    Args:
        make: called with the path at which to make it, where there is none yet.

    Raises:
        DataError: the cache cannot be written.
    """
    try:
        if not path.exists():
            make_folder(path.parent)
            with FileLock(path.with_name(f".{path.name}.lock")):
                if not path.exists():
                    _make(path, make)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def _make(path: Path, make: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.part")
    # That of a process that was killed.
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        make(part / path.name)
        for made in part.rglob("*"):
            sync(made)
        os.rename(part / path.name, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def prepare(
    text: ParallelText, vocabulary: Vocabulary, cache: Path, *, lowercase: bool = False
) -> Pairs:
    """The pairs of a text as ids, from files in a cache folder; written where they are missing.

    The folder's name is a digest of the text, the vocabulary and the options, see `made_once`.

    Args:
        lowercase: whether both sides are lower-cased first.

    Raises:
        DataError: the text or the cache folder cannot be used.
    """
    settings = FORM, text.digest, vocabulary.fingerprint(), text.tags, lowercase
    folder = cache / digest(settings)
    made_once(folder, lambda made: _write(text, vocabulary, made, lowercase))
    return Pairs.open(folder, text)


def digest(settings: Any) -> str:
    """16 characters for plain values, equal for equal values."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


class SentenceWriter:
    """Writes sentences to two files, a block of them at a time.

    Args:
        folder, name: the files are ``name.ids`` and ``name.starts`` in the folder.
        dtype: of the ids.
    """

    def __init__(self, folder: Path, name: str, dtype: str):
        self._folder, self._name, self._dtype = folder, name, dtype
        self._ids = open(folder / f"{name}.ids", "wb")  # noqa: SIM115
        self._starts = open(folder / f"{name}.starts", "wb")  # noqa: SIM115
        np.zeros(1, np.int64).tofile(self._starts)
        self._end = 0

    def add(self, rows: Sequence[Sequence[int]]) -> Sentences:
        """Writes a block, and returns it."""
        block = Sentences.of(rows)
        block.ids.astype(self._dtype).tofile(self._ids)
        (block.starts[1:] + self._end).tofile(self._starts)
        self._end += len(block.ids)
        return block

    def close(self) -> Sentences:
        """Ends the files, and opens what was written."""
        self._ids.close()
        self._starts.close()
        return _sentences(self._folder, self._name, self._dtype)


def _write(text: ParallelText, vocabulary: Vocabulary, folder: Path, lowercase: bool) -> None:
    folder.mkdir()
    sides = {"source": vocabulary, "target": vocabulary.target}
    dtypes = {k: "uint16" if len(side) <= 1 << 16 else "uint32" for k, side in sides.items()}
    writers = {name: SentenceWriter(folder, name, dtype) for name, dtype in dtypes.items()}
    unknown, rows = 0, ((source, target) for _, source, target in text)
    while block := list(itertools.islice(rows, AT_ONCE)):
        for (name, side), sentences in zip(sides.items(), zip(*block, strict=True), strict=True):
            tags = text.tags if name == "source" else ()
            texts = (lower(x, tags) if lowercase else x for x in sentences)
            found = writers[name].add([side.encode(x) for x in texts])
            unknown += int((found.ids == UNK).sum())
    for writer in writers.values():
        writer.close()
    about = {"dtypes": dtypes, "dropped": text.dropped, "unknown": unknown}
    (folder / ABOUT).write_text(json.dumps(about), "utf-8")
