"""What a training run is made of: one dataclass per section of a recipe file.

Text to recipe (files, overrides, nearest keys) is in `recipe_file`; this file knows values only.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from deepfast.memory.policies import POLICIES
from deepfast.memory.units import parse_bytes
from deepfast.models import KINDS, TransformerConfig, base, big, build
from deepfast.nn import DLCL
from deepfast.training.errors import RecipeError

SIZES = {"base": base, "big": big}
SCHEDULES = ("inverse_sqrt", "constant")
PRECISIONS = ("float32", "bfloat16")
LANGUAGES = ("de", "fr", "es")

DERIVED_FIELDS = ("vocab_size", "padding_idx")
"""Fields of a model's config that the vocabulary decides, not the recipe."""

MODEL_FIELDS = {
    name: kind
    for model in KINDS.values()
    for name, kind in model.fields.items()
    if name not in DERIVED_FIELDS
} | {"kind": str, "size": str | None}
"""Key -> type of the section `model`, of all kinds of models; the kind decides which may be set."""

DLCL_FIELDS = {
    name: parameter.annotation
    for name, parameter in inspect.signature(DLCL, eval_str=True).parameters.items()
    if name not in ("num_layers", "dim", "norm", "backend")
}
"""Key -> type of `model.dlcl`; the rest of DLCL's arguments follow from the model."""


def _expect(condition: bool, key: str, expected: str, got: Any) -> None:
    if not condition:
        raise RecipeError(f"{key}: expected {expected}, got {got!r}")


@dataclass(kw_only=True)
class DataSection:
    """Where the sentence pairs come from, and how they become batches."""

    phrases: str | None = None
    """"de", "fr" or "es": train on generated phrases from English; None: on the files below."""
    seed: int = 1
    """Seed of the generated phrases."""
    train_size: int = 30_000
    """Generated pairs to train on."""
    dev_size: int = 500
    """Generated pairs to validate on; 0 for no validation."""
    test_size: int = 1_000
    """Generated pairs held out for the end."""
    train_source: str | None = None
    """Text file, plain or gzip, one sentence a line."""
    train_target: str | None = None
    """Its translation, line by line."""
    dev_source: str | None = None
    """Text file to validate on, or None for no validation."""
    dev_target: str | None = None
    """Its translation."""
    test_source: str | None = None
    """Text file held out for the end, or None."""
    test_target: str | None = None
    """Its translation."""
    lowercase: bool = False
    """Train and validate on lower-cased text."""
    vocabulary: str | None = None
    """A ready sentencepiece model; None: learn one from the training pairs."""
    vocab_size: int = 8_000
    """Pieces of a learned vocabulary, shared by both languages, specials included."""
    vocab_at_most: bool = False
    """Take fewer pieces where the text does not support `vocab_size`."""
    max_tokens: int = 4_096
    """Tokens of a micro-batch on either side, padding included, at most."""
    max_length: int = 256
    """Tokens of a training sentence, bos or eos included; longer pairs are dropped and counted."""

    def __post_init__(self):
        allowed = ", ".join(LANGUAGES)
        known = self.phrases is None or self.phrases in LANGUAGES
        _expect(known, "data.phrases", f"one of {allowed} or null", self.phrases)
        for name in ("train_size", "max_tokens", "max_length"):
            value = getattr(self, name)
            _expect(value >= 1, f"data.{name}", "a whole number of at least 1", value)
        for name in ("dev_size", "test_size"):
            value = getattr(self, name)
            _expect(value >= 0, f"data.{name}", "a whole number of at least 0", value)
        _expect(self.vocab_size > 4, "data.vocab_size", "more than 4 pieces", self.vocab_size)
        _expect(
            self.max_length <= self.max_tokens,
            "data.max_length",
            f"at most data.max_tokens={self.max_tokens}, or a sentence would fit no batch",
            self.max_length,
        )
        self._check_files()

    def _check_files(self) -> None:
        if self.phrases is not None and self.train_source is not None:
            raise RecipeError(
                "data: expected either phrases or train_source and train_target, got both"
            )
        if self.phrases is None and self.train_source is None:
            raise RecipeError(
                "data: expected text to train on, got none: set data.train_source=FILE and "
                "data.train_target=FILE, or data.phrases=de"
            )
        for part in ("train", "dev", "test"):
            source, target = getattr(self, f"{part}_source"), getattr(self, f"{part}_target")
            if (source is None) != (target is None):
                missing = "source" if source is None else "target"
                raise RecipeError(f"data.{part}_{missing}: expected a file for both sides, got one")

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return self.dev_size > 0 if self.phrases else self.dev_source is not None

    @property
    def tests(self) -> bool:
        """Whether anything is held out for the end."""
        return self.test_size > 0 if self.phrases else self.test_source is not None


@dataclass(kw_only=True)
class OptimSection:
    """Adam, its schedule, and the loss."""

    lr: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup: int = 4_000
    """Steps of linear warm-up; then lr follows the schedule."""
    schedule: str = "inverse_sqrt"
    """After the warm-up: "inverse_sqrt" of the step, or "constant"."""
    restart_step: int | None = None
    """After so many steps Adam starts anew, at restart_lr from then on; None: never."""
    restart_lr: float | None = None
    """The constant rate after the restart."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: float = 1e-9
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled decay (AdamW) of the matrices of linear layers, per step and unit of lr."""
    l2: float = 0.0
    """Coefficient r of the penalty r/2 |w|^2 on the same matrices, in the gradient (Adam)."""
    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    accumulate: int = 1
    """Micro-batches per step; the loss is divided by the target tokens of all of them."""

    def __post_init__(self):
        _expect(self.lr > 0, "optim.lr", "a number above 0", self.lr)
        _expect(self.warmup >= 1, "optim.warmup", "at least 1 step", self.warmup)
        within = all(0 <= beta < 1 for beta in self.betas)
        _expect(within, "optim.betas", "two numbers in [0, 1)", list(self.betas))
        _expect(self.eps > 0, "optim.eps", "a number above 0", self.eps)
        allowed = f"one of {', '.join(SCHEDULES)}"
        _expect(self.schedule in SCHEDULES, "optim.schedule", allowed, self.schedule)
        restart, rate = self.restart_step, self.restart_lr
        expected = "at least 1 step or null"
        _expect(restart is None or restart >= 1, "optim.restart_step", expected, restart)
        both = (restart is None) == (rate is None)
        _expect(both, "optim.restart_lr", "a rate where restart_step is set, and only there", rate)
        _expect(rate is None or rate > 0, "optim.restart_lr", "a number above 0 or null", rate)
        for name in ("weight_decay", "l2"):
            value = getattr(self, name)
            _expect(value >= 0, f"optim.{name}", "a number of at least 0", value)
        one = not (self.weight_decay and self.l2)
        _expect(one, "optim.l2", "0 where optim.weight_decay is set", self.l2)
        smoothing = self.label_smoothing
        _expect(0 <= smoothing < 1, "optim.label_smoothing", "a number in [0, 1)", smoothing)
        clip = self.clip_norm
        _expect(clip is None or clip > 0, "optim.clip_norm", "a number above 0 or null", clip)
        enough = self.accumulate >= 1
        _expect(enough, "optim.accumulate", "at least 1 micro-batch", self.accumulate)


@dataclass(kw_only=True)
class TrainSection:
    """How long to train, how to compute, and what to keep."""

    max_steps: int | None = 100_000
    """Optimizer steps; None: until max_minutes or patience."""
    max_minutes: float | None = None
    """Minutes of training, validation included, over all resumes; None: no limit."""
    seed: int = 1
    """Seed of the parameters, dropout and the order of the batches."""
    device: str | None = None
    """"cpu", "cuda" or "cuda:1"; None: cuda where there is one."""
    precision: str = "float32"
    """"float32", or "bfloat16" for autocast; parameters and the loss stay float32."""
    threads: int | None = None
    """CPU threads; None: torch's default."""
    deterministic: bool = False
    """Only deterministic algorithms: two runs on a GPU agree to the bit. A CPU run always does."""
    validate_every: int = 1_000
    """Steps between validations."""
    patience: int | None = None
    """Stop after so many validations without a better NLL; None: never."""
    validate_bleu: bool = False
    """Translate the dev part at every validation too (slow); the NLL still chooses the best."""
    test_bleu: bool = False
    """Translate the test part at the end."""
    save_every: int = 1_000
    """Steps between checkpoints."""
    keep_last: int = 5
    """Checkpoints to keep, beside the best."""
    average_last: int = 5
    """Checkpoints to average into average.pt at the end; 0: none."""
    log_every: int = 50
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard events, where the package is installed."""

    def __post_init__(self):
        for name in ("validate_every", "save_every", "keep_last", "log_every"):
            value = getattr(self, name)
            _expect(value >= 1, f"train.{name}", "a whole number of at least 1", value)
        for name in ("max_steps", "patience", "threads"):
            value = getattr(self, name)
            expected = "a whole number of at least 1 or null"
            _expect(value is None or value >= 1, f"train.{name}", expected, value)
        minutes = self.max_minutes
        _expect(minutes is None or minutes > 0, "train.max_minutes", "above 0 or null", minutes)
        if self.max_steps is None and minutes is None and self.patience is None:
            raise RecipeError(
                "train: expected an end, got max_steps, max_minutes and patience all null"
            )
        allowed = f"one of {', '.join(PRECISIONS)}"
        _expect(self.precision in PRECISIONS, "train.precision", allowed, self.precision)
        expected = f"0 to keep_last={self.keep_last} checkpoints"
        within = 0 <= self.average_last <= self.keep_last
        _expect(within, "train.average_last", expected, self.average_last)


@dataclass(kw_only=True)
class Recipe:
    """A whole training run: `deepfast.training.train(recipe)`."""

    data: DataSection
    """Text, vocabulary and batches."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config; `kind`, "transformer" where it is absent; and for that kind
    `size`: "base" or "big", whose values they replace."""
    optim: OptimSection = field(default_factory=OptimSection)
    """Adam, its schedule, and the loss."""
    train: TrainSection = field(default_factory=TrainSection)
    """How long, how, and what to keep."""
    memory: str | None = None
    """A size such as "24GiB": what each layer keeps for backward is planned so that a step fits
    into it; or the name of a memory policy for all layers; None: "keep"."""
    output: str = "runs/deepfast"
    """Folder of checkpoints and metrics; it must be empty or new unless resuming."""
    resume: bool | str = False
    """True: continue from the newest checkpoint in `output`, or start where there is none. A
    path: continue from that file."""

    def __post_init__(self):
        # A model that cannot be built is refused before any data is read.
        config = self.model_config(vocab_size=8)
        if self.memory is not None:
            self._check_memory(config)
        if self.train.patience is not None and not self.data.validates:
            raise RecipeError("train.patience: expected dev pairs to validate on, got none")
        if self.train.validate_bleu and not self.data.validates:
            raise RecipeError("train.validate_bleu: expected dev pairs to translate, got none")
        if self.train.test_bleu and not self.data.tests:
            raise RecipeError("train.test_bleu: expected test pairs to translate, got none")
        _expect(bool(self.output), "output", "a folder", self.output)

    def _check_memory(self, config: Any) -> None:
        planned = isinstance(config, TransformerConfig)
        _expect(planned, "memory", "null for a model without memory policies", self.memory)
        if self.memory in POLICIES:
            mixes = self.memory != "history" or config.encoder_connection == "dlcl"
            expected = "another policy where model.encoder_connection is not dlcl"
            _expect(mixes, "memory", expected, self.memory)
            return
        try:
            parse_bytes(self.memory)
        except ValueError as error:
            expected = f"a size such as 24GiB, one of {', '.join(POLICIES)}, or null"
            raise RecipeError(f"memory: expected {expected}, got {self.memory!r}") from error

    def model_config(self, vocab_size: int, padding_idx: int = 0) -> Any:
        """The model's config, one of `deepfast.models.KINDS`, for a vocabulary."""
        options = dict(self.model)
        name, size = options.pop("kind", "transformer"), options.pop("size", None)
        _expect(name in KINDS, "model.kind", f"one of {', '.join(KINDS)}", name)
        kind = KINDS[name]
        sizes = SIZES if name == "transformer" else {}
        expected = f"one of {', '.join(sizes)} or null" if sizes else f"null for the kind {name}"
        _expect(size is None or size in sizes, "model.size", expected, size)
        unknown = sorted(options.keys() - (kind.fields.keys() - set(DERIVED_FIELDS)))
        if unknown:
            raise RecipeError(
                f"model.{unknown[0]}: expected a field of {kind.config.__name__} that the "
                "vocabulary does not decide"
            )
        make = sizes.get(size, kind.config)
        try:
            config = make(vocab_size=vocab_size, padding_idx=padding_idx, **options)
        except ValueError as error:
            raise RecipeError(f"model.{error}") from error
        if name == "transformer":
            _check_dlcl(config)
        return config

    def build_model(self, vocab_size: int, padding_idx: int = 0) -> nn.Module:
        """The model, initialised from torch's default generator."""
        return build(self.model_config(vocab_size, padding_idx))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as in a recipe file."""
        plain = asdict(self)
        plain["optim"]["betas"] = list(self.optim.betas)
        return plain


def _check_dlcl(config: TransformerConfig) -> None:
    """Values of ``model.dlcl`` that no DLCL takes."""
    if "dlcl" in (config.encoder_connection, config.decoder_connection):
        try:
            DLCL(1, config.dim, norm=config.norm, **config.dlcl)
        except (ValueError, TypeError) as error:
            reason = str(error).removeprefix("DLCL: ")
            raise RecipeError(f"model.dlcl: {reason}") from error
