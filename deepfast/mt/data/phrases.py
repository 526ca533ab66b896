"""A corpus that needs no download: English number, date and amount phrases with their translation.

Every phrase has exactly one translation. The numbers inside make the supply almost endless.
No phrase of the dev or test part occurs in training.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from deepfast import checks
from deepfast.files import DataError, make_folder
from deepfast.mt.data.phrase_kinds import KINDS, Pair
from deepfast.mt.data.text import write_lines

LANGUAGES = ("de", "fr", "es")
SPLITS = ("train", "dev", "test")

# A kind is exhausted when this many draws in a row gave no new phrase.
PATIENCE = 1000


@dataclass(frozen=True)
class Corpus:
    """Pairs of (English, foreign) in three disjoint parts, and the kind of every pair."""

    language: str
    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]
    kinds: dict[str, list[str]] = field(repr=False)
    """Part -> the kind of each of its pairs, such as `date`."""


def phrases(
    language: str,
    *,
    seed: int = 1,
    train: int = 30_000,
    dev: int = 500,
    test: int = 1_000,
    kinds: Sequence[str] | None = None,
) -> Corpus:
    """Generate a corpus from English into `language`.

    The result depends only on the arguments. The test part does not depend on `dev` or `train`, and
    the dev part not on `train`, so that runs with more or less training text are comparable. Over
    all three parts no two pairs share a source or a target, compared in the form of `folded`.

    Args:
        language: `de`, `fr` or `es`.
        train, dev, test: pairs of each part, shared evenly among the kinds.
        kinds: some of `phrase_kinds.KINDS`, by default all.

    Raises:
        ValueError: an unknown language, or a negative count.
        DataError: an unknown kind, or more pairs than there are phrases.
        MissingPackage: num2words or Babel is not installed.
    """
    checks.choice("phrases", LANGUAGES, language=language)
    chosen = tuple(KINDS if kinds is None else dict.fromkeys(kinds))
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or not chosen:
        raise DataError(
            f"phrases: kinds must be some of {', '.join(KINDS)}, got {', '.join(unknown) or 'none'}"
        )
    counts = {"train": train, "dev": dev, "test": test}
    checks.whole("phrases", 0, **counts)
    draws = {kind: _fresh(kind, language, seed) for kind in chosen}
    seen: tuple[set[str], set[str]] = set(), set()
    parts: dict[str, list[Pair]] = {}
    labels: dict[str, list[str]] = {}
    # The test part is drawn first, so that the sizes of the others cannot change it.
    for split in reversed(SPLITS):
        rows = [
            (_new(draws[kind], seen, kind), kind)
            for i, kind in enumerate(chosen)
            for _ in range(counts[split] // len(chosen) + (i < counts[split] % len(chosen)))
        ]
        Random(f"deepfast phrases {seed} {language} {split}").shuffle(rows)
        parts[split] = [pair for pair, _ in rows]
        labels[split] = [kind for _, kind in rows]
    return Corpus(language, **parts, kinds=labels)


def write(corpus: Corpus, folder: str | os.PathLike[str]) -> list[Path]:
    """Write `train.en`, `train.de` and so on, one phrase a line, for use like any other text.

    Returns:
        The six paths. A missing folder is created.

    Raises:
        DataError: the folder cannot be written.
    """
    folder = Path(folder)
    make_folder(folder)
    written = []
    for split in SPLITS:
        for side, suffix in enumerate(("en", corpus.language)):
            path = folder / f"{split}.{suffix}"
            write_lines(path, [pair[side] for pair in getattr(corpus, split)])
            written.append(path)
    return written


def folded(text: str) -> str:
    """The form in which phrases are compared: NFKC, case folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _fresh(kind: str, language: str, seed: int) -> Iterator[Pair]:
    """An endless stream of pairs of one kind, repetitions included."""
    random = Random(f"deepfast phrases {seed} {language} {kind}")
    while True:
        yield KINDS[kind](random, language)


def _new(draws: Iterator[Pair], seen: tuple[set[str], set[str]], kind: str) -> Pair:
    sources, targets = seen
    for _ in range(PATIENCE):
        pair = next(draws)
        source, target = map(folded, pair)
        if source not in sources and target not in targets:
            sources.add(source)
            targets.add(target)
            return pair
    raise DataError(
        f"phrases: expected fewer pairs or more kinds, got {len(sources)} pairs and no new phrase "
        f"of the kind {kind!r}"
    )
