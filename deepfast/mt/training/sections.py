"""The sections of a recipe: text, optimizer, training, decoding, and how ranks share the model.

A field of a section declares a key: its type with its limits, its default and its meaning.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from deepfast.checks import MOST_THREADS
from deepfast.mt.checked import (
    BeforeValidator,
    Checked,
    Count,
    Field,
    Fraction,
    Penalty,
    Positive,
    Size,
    checked,
    one_of,
)
from deepfast.mt.data.phrases import LANGUAGES
from deepfast.mt.data.vocabulary import SPECIALS, tag_of
from deepfast.mt.training.errors import RecipeError


def _path(given: Any) -> Any:
    """A path, which may begin with ~, the home."""
    return os.path.expanduser(given) if isinstance(given, (str, os.PathLike)) else given


def _names(given: Any) -> Any:
    """A list, or text with commas between the names."""
    if isinstance(given, str):
        return [name.strip() for name in given.split(",")]
    return list(given) if isinstance(given, tuple) else given


PATH = r"^[^\x00]+$"
File = Annotated[str, BeforeValidator(_path), Field(pattern=PATH, description="a file")]
Folder = Annotated[str, BeforeValidator(_path), Field(pattern=PATH, description="a folder")]
Pieces = Annotated[int, Field(gt=len(SPECIALS), lt=2**31)]
"""At most what sentencepiece reads."""
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""What torch.manual_seed takes."""
Seconds = Annotated[float, Field(gt=0, lt=1e6)]
Phrases = Annotated[
    list[Annotated[str, one_of(LANGUAGES)]],
    BeforeValidator(_names),
    Field(min_length=1, description=f"one or more of {', '.join(LANGUAGES)}"),
]
# A tag is one word.
Languages = Annotated[
    list[Annotated[str, Field(pattern=r"^[^\s,<>]+$")]],
    BeforeValidator(_names),
    Field(min_length=2, description="two or more names such as de or zh-CN"),
]
CODE = r"^[a-z]{2,3}(-[A-Za-z0-9]+)*$"
Language = Annotated[str, Field(pattern=CODE, description="a language's code such as de or zh")]
Betas = Annotated[
    tuple[Fraction, Fraction], Field(strict=False, description="a list of 2 numbers in [0, 1)")
]


@checked("data.", RecipeError)
class DataSection(Checked):
    """Where the sentence pairs come from, and how they become batches."""

    phrases: Phrases | None = None
    """Train on generated phrases between English and "de", "fr" or "es". For several languages,
    "de,fr" or a list, a tag such as `<de>` begins each source sentence. None: train on files."""
    direction: Literal["one-to-many", "many-to-one"] = "one-to-many"
    """Direction of generated phrases: "one-to-many" from English, "many-to-one" into English."""
    languages: Languages | None = None
    """For files: every source line begins with the tag of one of these languages."""
    target_language: Language | None = None
    """Code of the language of translations, which decides how BLEU splits them into words: "zh",
    "ja" and "ko" have tokenizers of their own, all others "13a"."""
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
    cache: Folder | None = None
    """A folder for the ids of training texts, which runs on the same text share; None: "text" in
    deepfast's cache folder."""
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

    def __post_init__(self):
        for key in ("phrases", "languages"):
            names = getattr(self, key) or ()
            self.expect(len({*names}) == len(names), key, "each language once")
        for key in ("languages", "train_source"):
            one = self.phrases is None or getattr(self, key) is None
            self.expect(one, key, "null with data.phrases; set data.phrases=null with files")
        learned = self.vocabulary is None
        one = self.target_vocabulary is None
        self.expect(one or not learned, "target_vocabulary", "null without data.vocabulary")
        self.expect(learned or not self.whole_words, "whole_words", "false with data.vocabulary")
        fits = learned or self.target_vocab_size is None
        self.expect(fits, "target_vocab_size", "null with data.vocabulary")
        expected = f"at most data.max_tokens={self.max_tokens}, or a sentence would fit no batch"
        self.expect(self.max_length <= self.max_tokens, "max_length", expected)
        for part in ("train", "dev", "test"):
            source, target = f"{part}_source", f"{part}_target"
            for key, other in ((source, target), (target, source)):
                fits = getattr(self, key) is not None or getattr(self, other) is None
                self.expect(fits, key, f"a file, as data.{other} is one")

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
    def tagged(self) -> tuple[str, ...]:
        """The languages, where sentences begin with a language's tag; empty for one language."""
        languages = tuple(self.languages or self.phrases or ())
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


@checked("optim.", RecipeError)
class OptimSection(Checked):
    """Adam, its schedule, and the loss."""

    lr: Positive = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup: Count = 4_000
    """Steps of linear warm-up; after them lr follows the schedule."""
    schedule: Literal["inverse_sqrt", "constant"] = "inverse_sqrt"
    """After the warm-up: "inverse_sqrt" of the step, or "constant"."""
    restart_step: Count | None = None
    """After this step Adam forgets its moments and starts with the rate restart_lr; None: never."""
    restart_lr: Positive | None = None
    """Constant rate after the restart."""
    restart_accumulate: Count | None = None
    """Micro-batches per step after the restart; None: `accumulate`."""
    betas: Betas = (0.9, 0.98)
    """Adam's decay rates."""
    eps: Positive = 1e-9
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

    def __post_init__(self):
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


@checked("train.", RecipeError)
class TrainSection(Checked):
    """How long to train, how to compute, and what to keep."""

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

    def __post_init__(self):
        ends = (self.max_steps, self.max_minutes, self.patience) != (None, None, None)
        self.expect(ends, "max_steps", "an end of the run by max_steps, max_minutes or patience")
        expected = f"0 to keep_last={self.keep_last} checkpoints"
        self.expect(self.average_last <= self.keep_last, "average_last", expected)


@checked("decode.", RecipeError)
class DecodeSection(Checked):
    """How the run's own translations are found, and by default those from its checkpoints; see
    `deepfast.mt.search.DecodingOptions`."""

    beam: Annotated[int, Field(ge=1, le=2**16)] = 4
    """Hypotheses kept per sentence; 1 is greedy search."""
    length_penalty: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Alpha of the score; 0 ranks by likelihood, higher prefers longer translations."""
    length_form: Literal["gnmt", "power"] = "gnmt"
    """What divides log P for n tokens, eos included: "gnmt" ((5 + n) / 6)^alpha, "power" n^alpha,
    which is fairseq's."""


@checked("parallel.", RecipeError)
class ParallelSection(Checked):
    """How ranks share the model. Without torchrun nothing here counts."""

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
