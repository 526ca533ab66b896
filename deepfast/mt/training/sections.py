"""The sections of a recipe: text, optimizer, training, and how ranks share the model.

A field of a section declares a key: its type with its limits, its default and its meaning.
`convert` checks a value by such a type.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from deepfast.checks import MOST_THREADS, shown
from deepfast.mt.data.phrases import LANGUAGES
from deepfast.mt.data.vocabulary import SPECIALS, tag_of
from deepfast.mt.training.errors import RecipeError, expect

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text",
         dict: "keys and values", list: "a list", types.NoneType: "null"}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """Which values of its type a key takes."""

    words: str
    """What an error expects, such as "a number above 0"."""
    fits: Callable[[Any], bool]
    path: bool = False
    """A path, which may begin with ~, the home."""


Rate = Annotated[float, Limit("a number above 0", lambda x: 0 < x < math.inf)]
Positive = Annotated[float, Limit("a number above 0", lambda x: x > 0)]
"""Infinity too: no limit."""
Penalty = Annotated[float, Limit("a number of at least 0", lambda x: 0 <= x < math.inf)]
Fraction = Annotated[float, Limit("a number in [0, 1)", lambda x: 0 <= x < 1)]
Count = Annotated[int, Limit("an integer of at least 1", lambda n: n >= 1)]
Size = Annotated[int, Limit("an integer of at least 0", lambda n: n >= 0)]
File = Annotated[str, Limit("a file", bool, path=True)]
MaybeFile = Annotated[str, Limit("text", lambda text: True, path=True)]
"""Empty text stands for none."""
# The home of no user, which is not replaced, stays in front.
Folder = Annotated[str, Limit("a folder, ./~NAME for one that begins with ~",
                              lambda text: text[:1] not in ("", "~"), path=True)]  # fmt: skip
# At most what sentencepiece reads.
Pieces = Annotated[int, Limit(f"5 to {2**31 - 1} pieces", lambda n: 4 < n < 2**31)]
Threads = Annotated[
    int, Limit(f"an integer from 1 to {MOST_THREADS}", lambda n: 1 <= n <= MOST_THREADS)
]
# What torch.manual_seed takes.
Seed = Annotated[int, Limit("an integer from -2^63 to 2^64 - 1", lambda n: -(2**63) <= n < 2**64)]
Seconds = Annotated[float, Limit("seconds above 0 and below 1e6", lambda x: 0 < x < 1e6)]


def convert(key: str, value: Any, kind: Any) -> Any:
    """A value as the type of its key. A number with a point may be written without one, a path may
    begin with ~.

    Raises:
        RecipeError: a value of another type or outside of its limits.
    """
    clean = not isinstance(value, str) or "\0" not in value
    expect(clean, key, "text without the character NUL", value)
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    options = typing.get_args(kind) if union else (kind,)
    words = []
    for option in options:
        annotated = typing.get_origin(option) is Annotated
        plain, limit = typing.get_args(option) if annotated else (option, None)
        if isinstance(value, os.PathLike) and limit and limit.path:
            value = os.fspath(value)
        origin, parts, found = typing.get_origin(plain), typing.get_args(plain), value
        if origin is tuple:
            words.append(f"a list of {len(parts)} numbers")
            if isinstance(value, (list, tuple)) and len(value) == len(parts):
                return tuple(convert(key, v, part) for v, part in zip(value, parts, strict=True))
        elif origin is Literal:
            words.append(f"one of {', '.join(parts)}")
            if isinstance(value, str) and value in parts:
                return value
        else:
            words.append(limit.words if limit else NAMES[plain])
            if limit and limit.path and isinstance(value, str):
                found = os.path.expanduser(value)
            if plain is list and isinstance(value, tuple):
                found = list(value)
            # YAML 1.1 reads 1e-3, which has no point, as text.
            if plain is float and isinstance(value, (int, str)) and not isinstance(value, bool):
                with contextlib.suppress(ValueError, OverflowError):
                    found = float(value)
            # In Python True is an integer, in a recipe it is not.
            same = isinstance(found, plain) and isinstance(found, bool) == (plain is bool)
            if same and (limit is None or limit.fits(found)):
                return found
    raise RecipeError(f"{key}: expected {' or '.join(words)}, got {shown(value)}")


class Section:
    """Base of the sections, which are dataclasses."""

    name: ClassVar[str]
    """The section's key in a recipe."""

    def __post_init__(self):
        for key, kind in field_types(type(self)).items():
            setattr(self, key, convert(f"{self.name}.{key}", getattr(self, key), kind))
        self.check()

    def check(self) -> None:
        """Refuses values that do not fit each other.

        Raises:
            RecipeError: names the key.
        """

    def expect(self, condition: bool, key: str, expected: str) -> None:
        """Refuses the value of a key if the condition does not hold."""
        expect(condition, f"{self.name}.{key}", expected, getattr(self, key))


def field_types(cls: type) -> dict[str, Any]:
    """Field of a dataclass -> its type, with its limits."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _listed(names: str | list | None) -> tuple[str, ...]:
    """Names from a list, or from text with commas between them."""
    parts = names.split(",") if isinstance(names, str) else names or ()
    return tuple(str(part).strip() for part in parts)


@dataclass(kw_only=True)
class DataSection(Section):
    """Where the sentence pairs come from, and how they become batches."""

    name = "data"

    phrases: str | list | None = None
    """Train on generated phrases between English and "de", "fr" or "es". For several languages,
    "de,fr" or a list, a tag such as `<de>` begins each source sentence. None: train on files."""
    direction: Literal["one-to-many", "many-to-one"] = "one-to-many"
    """Direction of generated phrases: "one-to-many" from English, "many-to-one" into English."""
    languages: str | list | None = None
    """For files: every source line begins with the tag of one of these languages."""
    seed: int = 1
    """Seed of the generated phrases."""
    train_size: Count = 30_000
    """Generated pairs to train on, of each language."""
    dev_size: Size = 500
    """Generated pairs to validate on, of each language; 0 for no validation."""
    test_size: Size = 1_000
    """Generated pairs to test on at the end, of each language."""
    train_source: File | None = None
    """Text file, plain or gzip, one sentence per line."""
    train_target: File | None = None
    """Its translation, line by line."""
    dev_source: File | None = None
    """Text file to validate on, or None for no validation."""
    dev_target: File | None = None
    """Its translation."""
    test_source: File | None = None
    """Text file to test on at the end, or None."""
    test_target: File | None = None
    """Its translation."""
    lowercase: bool = False
    """Train and validate on lower-cased text."""
    vocabulary: File | None = None
    """A ready sentencepiece model; None: learn one from the training pairs."""
    vocab_size: Pieces = 8_000
    """Pieces of a learned vocabulary, shared by both languages, specials included."""
    target_vocabulary: File | None = None
    """A ready sentencepiece model of the target; `vocabulary` is then of the source alone."""
    target_vocab_size: Pieces | None = None
    """Pieces of a learned vocabulary of the target's own; `vocab_size` then counts the source's.
    None: both languages share one vocabulary."""
    whole_words: bool = False
    """Learn the most frequent words in place of subwords; the text must be tokenised. `deepfast mt
    posunk` prepares it so that unknown words can be translated."""
    vocab_at_most: bool = False
    """Learn fewer pieces where the text is too small for `vocab_size`."""
    max_tokens: Count = 4_096
    """Most tokens of a micro-batch on either side, padding included. Under torchrun the ranks
    divide the micro-batches of a step, and then the sentences of each."""
    max_length: Count = 256
    """Most tokens of a training sentence, with bos or eos; longer pairs are dropped and counted."""

    def check(self) -> None:
        generated, files = self.phrases is not None, self.train_source is not None
        known = not generated or (bool(self.generated) and set(self.generated) <= set(LANGUAGES))
        self.expect(known, "phrases", f"one of {', '.join(LANGUAGES)} or null")
        once = len(set(self.generated)) == len(self.generated)
        self.expect(once, "phrases", "each language once")
        turned = self.direction != "one-to-many"
        self.expect(generated or not turned, "direction", "one-to-many without phrases")
        self.expect(not generated or self.languages is None, "languages", "null with phrases")
        self._check_languages()
        given, sized = self.vocabulary is not None, self.target_vocab_size is not None
        expected = "null without data.vocabulary and with data.target_vocab_size"
        fits = self.target_vocabulary is None or (given and not sized)
        self.expect(fits, "target_vocabulary", expected)
        self.expect(not (given and self.whole_words), "whole_words", "false with data.vocabulary")
        self.expect(not (given and sized), "target_vocab_size", "null with data.vocabulary")
        expected = f"at most data.max_tokens={self.max_tokens}, or a sentence would fit no batch"
        self.expect(self.max_length <= self.max_tokens, "max_length", expected)
        if generated and files:
            raise RecipeError(
                "data: expected either phrases or train_source and train_target, got both: set "
                "data.phrases=null with files"
            )
        for part in ("train", "dev", "test"):
            sides = f"{part}_source", f"{part}_target"
            missing = [side for side in sides if getattr(self, side) is None]
            if len(missing) == 1:
                raise RecipeError(f"data.{missing[0]}: expected a file for both sides, got one")

    def _check_languages(self) -> None:
        if self.languages is None:
            return
        names = _listed(self.languages)
        self.expect(len(names) > 1, "languages", "two or more languages or null")
        self.expect(len(set(names)) == len(names), "languages", "each language once")
        for name in names:
            # A tag is one word, and not one of the special pieces.
            fits = re.fullmatch(r"[^\s,<>]+", name) and tag_of(name) not in SPECIALS
            expect(bool(fits), "data.languages", "names such as de or zh-CN", name)

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


@dataclass(kw_only=True)
class OptimSection(Section):
    """Adam, its schedule, and the loss."""

    name = "optim"

    lr: Rate = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup: Count = 4_000
    """Steps of linear warm-up; after them lr follows the schedule."""
    schedule: Literal["inverse_sqrt", "constant"] = "inverse_sqrt"
    """After the warm-up: "inverse_sqrt" of the step, or "constant"."""
    restart_step: Count | None = None
    """After this step Adam forgets its moments and starts with the rate restart_lr; None: never."""
    restart_lr: Rate | None = None
    """Constant rate after the restart."""
    restart_accumulate: Count | None = None
    """Micro-batches per step after the restart; None: `accumulate`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: Rate = 1e-9
    """Adam's epsilon."""
    weight_decay: Penalty = 0.0
    """Decoupled decay (AdamW) of the matrices of linear layers: a step subtracts lr * weight_decay
    times the matrix."""
    l2: Penalty = 0.0
    """Coefficient r of the penalty r/2 |w|^2 on the same matrices, in the gradient of Adam."""
    label_smoothing: Fraction = 0.1
    """Probability spread evenly over the vocabulary."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    accumulate: Count = 1
    """Micro-batches per step, of all ranks together; the loss is divided by the target tokens of
    all of them."""

    def check(self) -> None:
        restarts = self.restart_step is not None
        expected = "a rate if restart_step is set, else null"
        self.expect(restarts == (self.restart_lr is not None), "restart_lr", expected)
        fits = restarts or self.restart_accumulate is None
        self.expect(fits, "restart_accumulate", "null without a restart")
        one = not (self.weight_decay and self.l2)
        self.expect(one, "l2", "0 if optim.weight_decay is set")

    def micro_batches(self, step: int) -> int:
        """Micro-batches of step ``step``, counted from 1."""
        if self.restart_accumulate is None or step <= self.restart_step:
            return self.accumulate
        return self.restart_accumulate


@dataclass(kw_only=True)
class TrainSection(Section):
    """How long to train, how to compute, and what to keep."""

    name = "train"

    max_steps: Count | None = 100_000
    """Optimizer steps; None: until max_minutes or patience."""
    max_minutes: Positive | None = None
    """Minutes of the whole run, with validation and the time before resuming; None: no limit."""
    seed: Seed = 1
    """Seed of the parameters, dropout and the order of the batches."""
    device: str | None = None
    """"cpu", "cuda" or "cuda:1"; None: cuda where there is one."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """"float32", or "bfloat16" for autocast; parameters and the loss stay float32."""
    threads: Threads | None = None
    """CPU threads; None: torch's default."""
    deterministic: bool = False
    """Only deterministic algorithms, so that two runs on a GPU agree to the bit. On a CPU they
    always do."""
    validate_every: Count = 1_000
    """Steps between validations."""
    patience: Count | None = None
    """Stop after this many validations without a better NLL; None: never."""
    validate_bleu: bool = False
    """Translate the dev part at every validation (slow). The best checkpoint is still that with the
    lowest NLL."""
    test_bleu: bool = False
    """Translate the test part at the end."""
    save_every: Count = 1_000
    """Steps between checkpoints."""
    keep_last: Count = 5
    """How many checkpoints of `save_every` to keep; the newest and the best are kept too."""
    average_last: Size = 5
    """How many checkpoints to average into average.pt at the end; 0: none."""
    log_every: Count = 50
    """Steps between lines of metrics."""
    accuracy: bool = False
    """Count the right target tokens in training too, which reads the logits once more. A validation
    always counts them."""
    tensorboard: bool = True
    """Write TensorBoard events, if the package is installed."""

    def check(self) -> None:
        if self.max_steps is None and self.max_minutes is None and self.patience is None:
            raise RecipeError(
                "train: expected an end, got max_steps, max_minutes and patience all null"
            )
        expected = f"0 to keep_last={self.keep_last} checkpoints"
        self.expect(self.average_last <= self.keep_last, "average_last", expected)


@dataclass(kw_only=True)
class ParallelSection(Section):
    """How ranks share the model. Without torchrun nothing here counts."""

    name = "parallel"

    kind: Literal["auto", "ddp", "fsdp"] = "auto"
    """"ddp": each rank has the whole model. "fsdp": each rank has a share of every layer, of its
    gradient and of its optimizer state, and gathers a layer while it runs. "auto": ddp where the
    model with gradient and optimizer state takes at most half of a rank's memory, else fsdp."""
    reshard: bool = True
    """With fsdp: free a gathered layer after forward, and gather it again in backward."""
    timeout: Seconds = 45.0
    """Seconds that a rank waits in a common call. A rank that has not come by then has failed, and
    so has a first rank that gives no sign of life for so long while the others wait for its
    work."""
