"""From text to batches: reads or generates sentence pairs, learns a vocabulary, cuts batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.files import DataError
from deepfast.mt.data import (
    Batch,
    Dropped,
    SeparateVocabularies,
    TokenBatches,
    Vocabulary,
    evaluation_batches,
    lower,
    phrases,
    read_parallel,
    split_tag,
    tag_of,
    write,
)
from deepfast.mt.training.recipe import DataSection

Pair = tuple[str, str]


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
    folder: Path | None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """Read or generate the text, learn a vocabulary where none is given, and cut batches.

    Args:
        seed: for the order of the batches.
        folder: where to write generated phrases, so that they can be translated later; None: the
            first rank writes them.
        vocabulary: that of the checkpoint that the run resumes from, or of the first rank.
    """
    parts, dropped, place = _read(section, folder)
    train = parts["train"]
    if vocabulary is None:
        vocabulary = _vocabulary(section, train)
    languages = _languages(section, vocabulary)
    pairs = vocabulary.encode_pairs(train)
    batches = TokenBatches(
        pairs,
        max_tokens=section.max_tokens,
        max_length=section.max_length,
        seed=seed,
        place=place,
        groups=_groups(pairs, languages, place),
    )
    dev_pairs = vocabulary.encode_pairs(parts["dev"])
    dev_groups = _groups(dev_pairs, languages, "dev pair {}".format)
    dev_batches = (
        evaluation_batches(dev_pairs, max_tokens=section.max_tokens, groups=dev_groups)
        if dev_pairs
        else []
    )
    summary = [
        f"vocabulary {_sizes(vocabulary)} pieces, {vocabulary.fingerprint()}",
        _describe("train", train, batches.pairs, vocabulary),
        f"      {dropped + batches.dropped}; sentences of at most {section.max_length} tokens, "
        f"{len(batches)} micro-batches an epoch",
    ]
    if dev_pairs:
        summary.append(_describe("dev", parts["dev"], dev_pairs, vocabulary))
    return Corpus(vocabulary, batches, dev_batches, parts["dev"], parts["test"], summary, languages)


def _vocabulary(section: DataSection, train: list[Pair]) -> Vocabulary:
    """Reads the vocabulary, or learns it from the training pairs."""

    def learned(text: Sequence[str], size: int, tags: list[str]) -> Vocabulary:
        return Vocabulary.train(
            text, size, at_most=section.vocab_at_most, tags=tags, whole_words=section.whole_words
        )

    if section.vocabulary is not None:
        vocabulary = Vocabulary.load(section.vocabulary)
        if section.target_vocabulary is None:
            return vocabulary
        return SeparateVocabularies(vocabulary, Vocabulary.load(section.target_vocabulary))
    sources, targets = zip(*train, strict=True)
    if section.target_vocab_size is None:
        # One language after the other, as in two files.
        return learned([*sources, *targets], section.vocab_size, section.tags)
    return SeparateVocabularies(
        learned(sources, section.vocab_size, section.tags),
        learned(targets, section.target_vocab_size, []),
    )


def _languages(section: DataSection, vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of the languages' tags; empty for one language."""
    missing = [tag_of(name) for name in section.tagged if tag_of(name) not in vocabulary.tags]
    if missing:
        raise DataError(
            f"expected a vocabulary with the tags of all languages, got one without "
            f"{', '.join(missing)}: learn one (data.vocabulary=null)"
        )
    return {name: vocabulary.tags[tag_of(name)] for name in section.tagged}


def _groups(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    languages: dict[str, int],
    place: Callable[[int], str],
) -> list[int] | None:
    """The tag of each pair: only pairs of one language share a batch. None for one language."""
    if not languages:
        return None
    tags = set(languages.values())
    for index, (source, _) in enumerate(pairs):
        if not source or source[0] not in tags:
            raise DataError(
                f"{place(index)}: expected a source that begins with the tag of one of the "
                f"languages {', '.join(map(tag_of, languages))}, got none"
            )
    return [source[0] for source, _ in pairs]


def by_language(pairs: Sequence[Pair]) -> dict[str, list[int]]:
    """The indices of each language's pairs; a source's tag names its language."""
    found: dict[str, list[int]] = {}
    for index, (source, _) in enumerate(pairs):
        tag = split_tag(source)[0]
        found.setdefault((tag or "").strip("<>"), []).append(index)
    return found


def _generate(section: DataSection, folder: Path | None) -> dict[str, list[Pair]]:
    """Phrases of all languages, one language after the other; also writes them to files."""
    parts: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    for language in section.generated:
        corpus = phrases(
            language,
            seed=section.seed,
            train=section.train_size,
            dev=section.dev_size,
            test=section.test_size,
        )
        if folder is not None:
            # A folder for each language, because their English files have the same name.
            write(corpus, folder / "phrases" / (f"en-{language}" if section.tagged else ""))
        tag = f"{tag_of(language)} " if section.tagged else ""
        for part, pairs in parts.items():
            for english, foreign in getattr(corpus, part):
                turned = section.direction == "many-to-one"
                source, target = (foreign, english) if turned else (english, foreign)
                pairs.append((tag + source, target))
    return parts


def _read(
    section: DataSection, folder: Path | None, wanted: Sequence[str] = ("train", "dev", "test")
) -> tuple[dict[str, list[Pair]], Dropped, Callable[[int], str]]:
    """The pairs of each part, the training pairs that were dropped, and a function that names the
    place of a training pair."""
    section.check_text()
    dropped = Dropped()
    place: Callable[[int], str] = "example {}".format
    if section.phrases is not None:
        parts = _generate(section, folder)
    else:
        parts = {part: [] for part in wanted}
        for part in wanted:
            source, target = (getattr(section, f"{part}_{side}") for side in ("source", "target"))
            if source is not None:
                found = read_parallel(source, target, tags=section.tags)
                parts[part] = found.pairs
                if part == "train":
                    dropped, place = found.dropped, found.place
    if section.lowercase:
        tags = section.tags
        parts = {p: [(lower(s, tags), t.lower()) for s, t in pairs] for p, pairs in parts.items()}
    return parts, dropped, place


def held_out(section: DataSection) -> tuple[list[Pair], list[Pair]]:
    """The dev and the test pairs of `load_corpus`, without the training text of files."""
    parts, *_ = _read(section, None, ("dev", "test"))
    return parts["dev"], parts["test"]


def _sizes(vocabulary: Vocabulary) -> str:
    shared = vocabulary.target is vocabulary
    return str(len(vocabulary)) if shared else f"{len(vocabulary)} and {vocabulary.target_size}"


def _describe(
    part: str,
    pairs: Sequence[Pair],
    encoded: Sequence[tuple[Sequence[int], Sequence[int]]],
    vocabulary: Vocabulary,
) -> str:
    sources = sum(len(source) + 1 for source, _ in encoded)
    targets = sum(len(target) + 1 for _, target in encoded)
    ids = [piece for pair in encoded for side in pair for piece in side]
    unknown = ids.count(vocabulary.unk_id) / max(len(ids), 1)
    return (
        f"{part:5} {len(pairs):,} pairs, {sources:,} source and {targets:,} target tokens "
        f"(eos included), {unknown:.2%} unknown pieces"
    )
