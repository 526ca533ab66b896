"""The section `data` of a recipe: text, languages, vocabulary, batch sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepfast.mt.data.vocabulary import SPECIALS, tag_of
from deepfast.mt.training.errors import RecipeError, expect

LANGUAGES = ("de", "fr", "es")
MOST_PIECES = 2**31 - 1
"""What sentencepiece reads."""
DIRECTIONS = ("one-to-many", "many-to-one")


def _listed(names: str | list | None) -> tuple[str, ...]:
    """Names from a list, or from text with commas between them."""
    parts = names.split(",") if isinstance(names, str) else names or ()
    return tuple(str(part).strip() for part in parts)


@dataclass(kw_only=True)
class DataSection:
    """Where the sentence pairs come from, and how they become batches."""

    phrases: str | list | None = None
    """Train on generated phrases between English and "de", "fr" or "es". For several languages,
    "de,fr" or a list, a tag such as `<de>` begins each source sentence. None: train on files."""
    direction: str = "one-to-many"
    """Direction of generated phrases: "one-to-many" from English, "many-to-one" into English."""
    languages: str | list | None = None
    """For files: every source line begins with the tag of one of these languages."""
    seed: int = 1
    """Seed of the generated phrases."""
    train_size: int = 30_000
    """Generated pairs to train on, of each language."""
    dev_size: int = 500
    """Generated pairs to validate on, of each language; 0 for no validation."""
    test_size: int = 1_000
    """Generated pairs to test on at the end, of each language."""
    train_source: str | None = None
    """Text file, plain or gzip, one sentence per line."""
    train_target: str | None = None
    """Its translation, line by line."""
    dev_source: str | None = None
    """Text file to validate on, or None for no validation."""
    dev_target: str | None = None
    """Its translation."""
    test_source: str | None = None
    """Text file to test on at the end, or None."""
    test_target: str | None = None
    """Its translation."""
    lowercase: bool = False
    """Train and validate on lower-cased text."""
    vocabulary: str | None = None
    """A ready sentencepiece model; None: learn one from the training pairs."""
    vocab_size: int = 8_000
    """Pieces of a learned vocabulary, shared by both languages, specials included."""
    target_vocabulary: str | None = None
    """A ready sentencepiece model of the target; `vocabulary` is then of the source alone."""
    target_vocab_size: int | None = None
    """Pieces of a learned vocabulary of the target's own; `vocab_size` then counts the source's.
    None: both languages share one vocabulary."""
    whole_words: bool = False
    """Learn the most frequent words in place of subwords; the text must be tokenised. `deepfast
    posunk` prepares it so that unknown words can be translated."""
    vocab_at_most: bool = False
    """Learn fewer pieces where the text is too small for `vocab_size`."""
    max_tokens: int = 4_096
    """Most tokens of a micro-batch on either side, padding included. Under torchrun the ranks
    divide the micro-batches of a step, and then the sentences of each."""
    max_length: int = 256
    """Most tokens of a training sentence, with bos or eos; longer pairs are dropped and counted."""

    def __post_init__(self):
        allowed = ", ".join(LANGUAGES)
        generated = self.generated
        known = self.phrases is None or (bool(generated) and set(generated) <= set(LANGUAGES))
        expect(known, "data.phrases", f"one of {allowed} or null", self.phrases)
        once = len(set(generated)) == len(generated)
        expect(once, "data.phrases", "each language once", self.phrases)
        allowed = ", ".join(DIRECTIONS)
        turns = self.phrases is not None or self.direction == DIRECTIONS[0]
        expect(turns, "data.direction", f"{DIRECTIONS[0]} without phrases", self.direction)
        expect(self.direction in DIRECTIONS, "data.direction", f"one of {allowed}", self.direction)
        given = self.languages is None or self.phrases is None
        expect(given, "data.languages", "null beside phrases", self.languages)
        self._check_languages()
        for name in ("train_size", "max_tokens", "max_length"):
            value = getattr(self, name)
            expect(value >= 1, f"data.{name}", "a whole number of at least 1", value)
        for name in ("dev_size", "test_size"):
            value = getattr(self, name)
            expect(value >= 0, f"data.{name}", "a whole number of at least 0", value)
        size = self.target_vocab_size
        for name, value in (("vocab_size", self.vocab_size), ("target_vocab_size", size)):
            expect(value is None or value > 4, f"data.{name}", "more than 4 pieces", value)
            within = value is None or value <= MOST_PIECES
            expect(within, f"data.{name}", f"at most {MOST_PIECES} pieces", value)
        both = (self.target_vocabulary is None) or (self.vocabulary is not None and size is None)
        expect(
            both, "data.target_vocabulary",
            "null without data.vocabulary and beside data.target_vocab_size",
            self.target_vocabulary,
        )  # fmt: skip
        expect(
            not self.whole_words or self.vocabulary is None, "data.whole_words",
            "false beside data.vocabulary", self.whole_words,
        )  # fmt: skip
        learned = size is None or self.vocabulary is None
        expect(learned, "data.target_vocab_size", "null beside data.vocabulary", size)
        expect(
            self.max_length <= self.max_tokens,
            "data.max_length",
            f"at most data.max_tokens={self.max_tokens}, or a sentence would fit no batch",
            self.max_length,
        )
        for name in ("vocabulary", "target_vocabulary"):
            expect(getattr(self, name) != "", f"data.{name}", "a file or null", "")
        self._check_files()

    def _check_languages(self) -> None:
        if self.languages is None:
            return
        names = _listed(self.languages)
        expect(len(names) > 1, "data.languages", "two or more languages or null", self.languages)
        once = len(set(names)) == len(names)
        expect(once, "data.languages", "each language once", self.languages)
        for name in names:
            # A tag is one word, and not one of the special pieces.
            fits = re.fullmatch(r"[^\s,<>]+", name) and tag_of(name) not in SPECIALS
            expect(bool(fits), "data.languages", "names such as de or zh-CN", name)

    def _check_files(self) -> None:
        if self.phrases is not None and self.train_source is not None:
            raise RecipeError(
                "data: expected either phrases or train_source and train_target, got both: set "
                "data.phrases=null beside files"
            )
        for part in ("train", "dev", "test"):
            source, target = getattr(self, f"{part}_source"), getattr(self, f"{part}_target")
            for side, file in (("source", source), ("target", target)):
                expect(file != "", f"data.{part}_{side}", "a file or null", file)
            if (source is None) != (target is None):
                missing = "source" if source is None else "target"
                raise RecipeError(f"data.{part}_{missing}: expected a file for both sides, got one")

    def check_text(self) -> None:
        """Refuses a section without text. Not in `__post_init__`: a recipe file may leave the text
        to the command line."""
        if self.phrases is None and self.train_source is None:
            raise RecipeError(
                "data: expected text to train on, got none: set data.train_source=FILE and "
                "data.train_target=FILE, or data.phrases=de"
            )

    @property
    def separate(self) -> bool:
        """Whether source and target have vocabularies of their own."""
        return self.target_vocabulary is not None or self.target_vocab_size is not None

    @property
    def generated(self) -> tuple[str, ...]:
        """Languages of generated phrases."""
        return _listed(self.phrases)

    @property
    def tagged(self) -> tuple[str, ...]:
        """The languages, where sentences begin with a language's tag; empty for one language."""
        languages = _listed(self.languages) or self.generated
        return languages if len(languages) > 1 else ()

    @property
    def tags(self) -> list[str]:
        """The tags of these languages."""
        return [tag_of(language) for language in self.tagged]

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return self.dev_size > 0 if self.phrases else self.dev_source is not None

    @property
    def tests(self) -> bool:
        """Whether there is anything to test on."""
        return self.test_size > 0 if self.phrases else self.test_source is not None
