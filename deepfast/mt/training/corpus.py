"""From text to batches: reads or generates sentence pairs, learns a vocabulary, cuts batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepfast.files import DataError, cache_folder, make_folder
from deepfast.mt.data import (
    Batch,
    Pairs,
    ParallelText,
    TokenBatches,
    Vocabulary,
    evaluation_batches,
    lower,
    phrases,
    prepare,
    split_tag,
    tag_of,
)
from deepfast.mt.data.pairs import FORM, digest, made_once
from deepfast.mt.data.text import write_lines
from deepfast.mt.training.recipe import DataSection

Pair = tuple[str, str]

SAMPLE = 1_000_000
"""The most sentence pairs that a vocabulary is learned from."""


@dataclass
class Corpus:
    """Everything that depends on the text."""

    vocabulary: Vocabulary
    batches: TokenBatches
    """The batches of the training pairs; their order can be resumed."""
    dev_batches: list[Batch]
    """Every dev pair once; empty where there are no dev pairs."""
    dev: list[Pair]
    test: list[Pair]
    summary: list[str]
    """Lines to print: sizes, tokens, unknown pieces, dropped pairs."""
    languages: dict[str, int]
    """Language -> id of its tag, with which its source sentences begin; empty for one language."""


def load_corpus(
    section: DataSection,
    *,
    seed: int,
    folder: Path,
    vocabulary: Vocabulary | None = None,
    generate: bool = True,
) -> Corpus:
    """Read or generate the text, learn a vocabulary where none is given, and cut batches.

    The ids of the training text are written to `data.cache` once.

    Args:
        seed: for the order of the batches.
        folder: of the run; generated phrases are files in its folder "phrases".
        vocabulary: that of the checkpoint that the run resumes from, or of the first rank.
        generate: write the phrases; the first rank does it for all.
    """
    if section.phrases:
        section = _generated(section, folder / "phrases", generate)
    train, *held_out = (_text(section, part) for part in ("train", "dev", "test"))
    dev, test = ([(x, y) for _, x, y in text] if text else [] for text in held_out)
    dev, test = _cased(section, dev), _cased(section, test)
    cache = Path(section.cache) if section.cache else cache_folder() / "text"
    if vocabulary is None:
        vocabulary = _vocabulary(section, train, cache)
    languages = _languages(section, vocabulary)
    pairs = prepare(train, vocabulary, cache, lowercase=section.lowercase)
    dev_pairs, test_pairs = (
        Pairs.of(vocabulary.encode_pairs(own), text)
        for own, text in zip((dev, test), held_out, strict=True)
    )
    # Not at the end of the run, when it translates them.
    _groups(test_pairs, languages, "test")
    batches = TokenBatches(
        pairs,
        max_tokens=section.max_tokens,
        max_length=section.max_length,
        seed=seed,
        groups=_groups(pairs, languages, "train"),
    )
    groups = _groups(dev_pairs, languages, "dev")
    dev_batches = evaluation_batches(dev_pairs, max_tokens=section.max_tokens, groups=groups)
    summary = [
        f"vocabulary {_sizes(vocabulary)} pieces, {vocabulary.fingerprint()}",
        _describe("train", pairs),
        f"      {batches.dropped}; sentences of at most {section.max_length} tokens, "
        f"{len(batches)} micro-batches an epoch",
    ]
    if dev:
        summary.append(_describe("dev", dev_pairs))
    return Corpus(vocabulary, batches, dev_batches, dev, test, summary, languages)


def _text(section: DataSection, part: str) -> ParallelText | None:
    """A part's files; None where the recipe names none."""
    source, target = (getattr(section, f"{part}_{side}") for side in ("source", "target"))
    return ParallelText(source, target, section.tags) if source else None


def _cased(section: DataSection, pairs: list[Pair]) -> list[Pair]:
    """The pairs, lower-cased where the recipe says so."""
    if not section.lowercase:
        return pairs
    return [(lower(source, section.tags), target.lower()) for source, target in pairs]


def _vocabulary(section: DataSection, train: ParallelText, cache: Path) -> Vocabulary:
    """Reads the vocabulary, or learns it from a sample of the training pairs and keeps it in the
    cache."""
    if section.vocabulary is not None:
        vocabulary = Vocabulary.load(section.vocabulary)
        if section.target_vocabulary is None:
            return vocabulary
        return vocabulary.with_target(Vocabulary.load(section.target_vocabulary))

    def learned(sides: slice, size: int, tags: list[str]) -> Vocabulary:
        return Vocabulary.train(
            itertools.chain.from_iterable(pair[sides] for pair in _sample(section, train)),
            size,
            at_most=section.vocab_at_most,
            tags=tags,
            whole_words=section.whole_words,
        )

    def make() -> Vocabulary:
        if section.target_vocab_size is None:
            return learned(slice(2), section.vocab_size, section.tags)
        source = learned(slice(1), section.vocab_size, section.tags)
        return source.with_target(learned(slice(1, 2), section.target_vocab_size, []))

    names = "vocab_size", "target_vocab_size", "vocab_at_most", "whole_words", "lowercase"
    options = [getattr(section, name) for name in names]
    settings = FORM, SAMPLE, train.digest, train.tags, options
    path = cache / f"{digest(settings)}.vocabulary"
    made_once(path, lambda made: made.write_bytes(make().to_bytes()))
    return Vocabulary.from_bytes(path.read_bytes())


def _sample(section: DataSection, train: ParallelText) -> Iterable[Pair]:
    """Every n-th pair, so that there are at most `SAMPLE`."""
    count = sum(1 for _ in train)
    pairs = ((source, target) for _, source, target in train)
    chosen = itertools.islice(pairs, 0, None, -(-count // SAMPLE))
    return (_cased(section, [pair])[0] for pair in chosen)


def _languages(section: DataSection, vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of the languages' tags; empty for one language."""
    missing = [tag_of(name) for name in section.tagged if tag_of(name) not in vocabulary.tags]
    if missing:
        raise DataError(
            f"expected a vocabulary with the tags of all languages, got one without "
            f"{', '.join(missing)}: learn one (data.vocabulary=null)"
        )
    return {name: vocabulary.tags[tag_of(name)] for name in section.tagged}


def _groups(pairs: Pairs, languages: dict[str, int], part: str) -> np.ndarray | None:
    """The tag of each pair: only pairs of one language share a batch. None for one language."""
    if not languages:
        return None
    ids, starts = pairs.source.ids, pairs.source.starts[:-1]
    # A sentence without ids is that of the next one, which is no tag either way.
    first = np.append(ids, 0)[starts]
    wrong = (pairs.source.lengths == 0) | ~np.isin(first, list(languages.values()))
    if wrong.any():
        place, tags = pairs.place(int(np.argmax(wrong))), ", ".join(map(tag_of, languages))
        raise DataError(
            f"{part} text, {place}: expected a source that begins with the tag of one of the "
            f"languages {tags}, got none"
        )
    return first


def by_language(pairs: Sequence[Pair]) -> dict[str, list[int]]:
    """The indices of each language's pairs; a source's tag names its language."""
    found: dict[str, list[int]] = {}
    for index, (source, _) in enumerate(pairs):
        tag = split_tag(source)[0]
        found.setdefault((tag or "").strip("<>"), []).append(index)
    return found


def _generated(section: DataSection, folder: Path, write: bool) -> DataSection:
    """The section with files of generated phrases, of one language after the other."""
    sizes = {"train": section.train_size, "dev": section.dev_size, "test": section.test_size}
    parts: dict[str, list[Pair]] = {part: [] for part in sizes}
    for language in section.phrases if write else ():
        tag = f"{tag_of(language)} " if section.tagged else ""
        for part, pairs in phrases(language, seed=section.seed, **sizes).items():
            for english, foreign in pairs:
                turned = section.direction == "many-to-one"
                source, target = (foreign, english) if turned else (english, foreign)
                parts[part].append((tag + source, target))
    files: dict[str, Any] = {}
    for part in (part for part, size in sizes.items() if size):
        for side, name in enumerate(("source", "target")):
            files[f"{part}_{name}"] = folder / f"{part}.{name}"
            if write:
                make_folder(folder)
                write_lines(folder / f"{part}.{name}", [pair[side] for pair in parts[part]])
    return replace(section, phrases=None, languages=list(section.tagged) or None, **files)


def _sizes(vocabulary: Vocabulary) -> str:
    shared = vocabulary.target is vocabulary
    return str(len(vocabulary)) if shared else f"{len(vocabulary)} and {len(vocabulary.target)}"


def _describe(part: str, pairs: Pairs) -> str:
    sources, targets = (len(side.ids) for side in (pairs.source, pairs.target))
    unknown = pairs.unknown / max(sources + targets, 1)
    return (
        f"{part:5} {len(pairs):,} pairs, {sources + len(pairs):,} source and "
        f"{targets + len(pairs):,} target tokens (eos included), {unknown:.2%} unknown pieces"
    )
