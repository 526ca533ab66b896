"""The parts of a training run: one dataclass per section of a recipe.

`recipe_file` reads recipes from files and overrides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from deepfast.checks import MOST_THREADS, shown
from deepfast.memory.policies import MIXING, POLICIES
from deepfast.memory.units import parse_bytes
from deepfast.mt.models import (
    KINDS,
    DepthGrowingConfig,
    TransformerConfig,
    base,
    big,
)
from deepfast.mt.models.registry import DERIVED_FIELDS
from deepfast.mt.models.transformer_config import option_types
from deepfast.mt.training.data_section import DataSection
from deepfast.mt.training.errors import RecipeError, expect
from deepfast.mt.training.parallel_section import ParallelSection

SIZES = {"base": base, "big": big}
SCHEDULES = ("inverse_sqrt", "constant")
PRECISIONS = ("float32", "bfloat16")

MODEL_FIELDS = {
    name: kind
    for model in KINDS.values()
    for name, kind in get_type_hints(model.Config).items()
    if name not in DERIVED_FIELDS
} | {"kind": str, "size": str | None}
"""Key -> type in the section `model`, for all kinds of models together."""

NESTED_FIELDS = {
    "dlcl": option_types("dlcl"),
    "top_dlcl": option_types("dlcl"),
    "latent": option_types("latent"),
    "fusion": option_types("fusion"),
}
"""Key in the section `model` that holds further keys -> their types."""


@dataclass(kw_only=True)
class OptimSection:
    """Adam, its schedule, and the loss."""

    lr: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    warmup: int = 4_000
    """Steps of linear warm-up; after them lr follows the schedule."""
    schedule: str = "inverse_sqrt"
    """After the warm-up: "inverse_sqrt" of the step, or "constant"."""
    restart_step: int | None = None
    """After this step Adam starts anew, with the rate restart_lr; None: never."""
    restart_lr: float | None = None
    """Constant rate after the restart."""
    restart_accumulate: int | None = None
    """Micro-batches per step after the restart; None: `accumulate`."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: float = 1e-9
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled decay (AdamW) of the matrices of linear layers: a step subtracts lr * weight_decay
    times the matrix."""
    l2: float = 0.0
    """Coefficient r of the penalty r/2 |w|^2 on the same matrices, in the gradient of Adam."""
    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    accumulate: int = 1
    """Micro-batches per step, of all ranks together; the loss is divided by the target tokens of
    all of them."""

    def __post_init__(self):
        expect(0 < self.lr < math.inf, "optim.lr", "a number above 0", self.lr)
        expect(self.warmup >= 1, "optim.warmup", "at least 1 step", self.warmup)
        within = all(0 <= beta < 1 for beta in self.betas)
        expect(within, "optim.betas", "two numbers in [0, 1)", list(self.betas))
        expect(0 < self.eps < math.inf, "optim.eps", "a number above 0", self.eps)
        allowed = f"one of {', '.join(SCHEDULES)}"
        expect(self.schedule in SCHEDULES, "optim.schedule", allowed, self.schedule)
        restart, rate = self.restart_step, self.restart_lr
        expected = "at least 1 step or null"
        expect(restart is None or restart >= 1, "optim.restart_step", expected, restart)
        both = (restart is None) == (rate is None)
        expect(both, "optim.restart_lr", "a rate if restart_step is set, else null", rate)
        finite = rate is None or 0 < rate < math.inf
        expect(finite, "optim.restart_lr", "a number above 0 or null", rate)
        small, expected = self.restart_accumulate, "at least 1 micro-batch after a restart, or null"
        within = small is None or (restart is not None and small >= 1)
        expect(within, "optim.restart_accumulate", expected, small)
        for name in ("weight_decay", "l2"):
            value = getattr(self, name)
            expect(0 <= value < math.inf, f"optim.{name}", "a number of at least 0", value)
        one = not (self.weight_decay and self.l2)
        expect(one, "optim.l2", "0 if optim.weight_decay is set", self.l2)
        smoothing = self.label_smoothing
        expect(0 <= smoothing < 1, "optim.label_smoothing", "a number in [0, 1)", smoothing)
        clip = self.clip_norm
        expect(clip is None or clip > 0, "optim.clip_norm", "a number above 0 or null", clip)
        enough = self.accumulate >= 1
        expect(enough, "optim.accumulate", "at least 1 micro-batch", self.accumulate)

    def micro_batches(self, step: int) -> int:
        """Micro-batches of step ``step``, counted from 1."""
        if self.restart_accumulate is None or step <= self.restart_step:
            return self.accumulate
        return self.restart_accumulate


@dataclass(kw_only=True)
class TrainSection:
    """How long to train, how to compute, and what to keep."""

    max_steps: int | None = 100_000
    """Optimizer steps; None: until max_minutes or patience."""
    max_minutes: float | None = None
    """Minutes of the whole run, with validation and the time before resuming; None: no limit."""
    seed: int = 1
    """Seed of the parameters, dropout and the order of the batches."""
    device: str | None = None
    """"cpu", "cuda" or "cuda:1"; None: cuda where there is one."""
    precision: str = "float32"
    """"float32", or "bfloat16" for autocast; parameters and the loss stay float32."""
    threads: int | None = None
    """CPU threads; None: torch's default."""
    deterministic: bool = False
    """Only deterministic algorithms, so that two runs on a GPU agree to the bit. On a CPU they
    always do."""
    validate_every: int = 1_000
    """Steps between validations."""
    patience: int | None = None
    """Stop after this many validations without a better NLL; None: never."""
    validate_bleu: bool = False
    """Translate the dev part at every validation (slow). The best checkpoint is still that with the
    lowest NLL."""
    test_bleu: bool = False
    """Translate the test part at the end."""
    save_every: int = 1_000
    """Steps between checkpoints."""
    keep_last: int = 5
    """How many checkpoints of `save_every` to keep; the newest and the best are kept too."""
    average_last: int = 5
    """How many checkpoints to average into average.pt at the end; 0: none."""
    log_every: int = 50
    """Steps between lines of metrics."""
    accuracy: bool = False
    """Count the right target tokens in training too, which reads the logits once more. A validation
    always counts them."""
    tensorboard: bool = True
    """Write TensorBoard events, if the package is installed."""

    def __post_init__(self):
        for name in ("validate_every", "save_every", "keep_last", "log_every"):
            value = getattr(self, name)
            expect(value >= 1, f"train.{name}", "a whole number of at least 1", value)
        for name in ("max_steps", "patience"):
            value = getattr(self, name)
            expected = "a whole number of at least 1 or null"
            expect(value is None or value >= 1, f"train.{name}", expected, value)
        threads, expected = self.threads, f"a whole number from 1 to {MOST_THREADS} or null"
        within = threads is None or 1 <= threads <= MOST_THREADS
        expect(within, "train.threads", expected, threads)
        # What torch.manual_seed takes.
        within = -(2**63) <= self.seed < 2**64
        expect(within, "train.seed", "a whole number from -2^63 to 2^64 - 1", self.seed)
        minutes = self.max_minutes
        expect(minutes is None or minutes > 0, "train.max_minutes", "above 0 or null", minutes)
        if self.max_steps is None and minutes is None and self.patience is None:
            raise RecipeError(
                "train: expected an end, got max_steps, max_minutes and patience all null"
            )
        allowed = f"one of {', '.join(PRECISIONS)}"
        expect(self.precision in PRECISIONS, "train.precision", allowed, self.precision)
        expected = f"0 to keep_last={self.keep_last} checkpoints"
        within = 0 <= self.average_last <= self.keep_last
        expect(within, "train.average_last", expected, self.average_last)


@dataclass(kw_only=True)
class Recipe:
    """A whole training run: `deepfast.mt.training.train(recipe)`."""

    data: DataSection
    """Text, vocabulary and batches."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config. Also `kind`, one of deepfast.mt.models.KINDS, by default
    "transformer"; and for a transformer `size`, "base" or "big", which sets other defaults."""
    optim: OptimSection = field(default_factory=OptimSection)
    """Adam, its schedule, and the loss."""
    train: TrainSection = field(default_factory=TrainSection)
    """How long, how, and what to keep."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    """How the ranks share the model, under torchrun."""
    memory: str | None = None
    """A size such as "24GiB": a plan decides what each layer keeps for backward, so that a step
    fits into it. Or the name of a memory policy for all layers. None: "keep"."""
    grow: dict[str, Any] | None = None
    """A second run puts layers on top of the first run's best checkpoint. The first run is in
    `output`/stage1, the second in `output`/stage2. All keys are optional:

        from    a checkpoint to grow on, with the sizes of this recipe; then there is no first run
        model   fields of the top: those of DepthGrowingConfig that TransformerConfig does not have
        optim   keys of the section `optim` that differ from the first run
        train   keys of the section `train` that differ from the first run

    The second run counts its own steps from 0. `grow.train.max_steps` is its length; without that
    key it is as long as the first. The same holds for warmup, max_minutes and patience. An empty
    section `grow` grows with the defaults."""
    output: str = "runs/deepfast"
    """Folder for checkpoints and metrics. It must be empty or new, unless the run resumes."""
    resume: bool | str = False
    """True: continue from the newest checkpoint in `output`, or start where there is none. A path:
    continue from that checkpoint, in a new folder or, if no later one is there, in its own. The
    recipe may have changed, but not in what the run began with: its text, vocabulary, seed and
    model."""

    def __post_init__(self):
        # Refuses a model that cannot be built, before any data is read.
        config = self.model_config(vocab_size=8)
        if self.memory is not None:
            self._check_memory(config)
        if self.train.patience is not None and not self.data.validates:
            raise RecipeError("train.patience: expected dev pairs to validate on, got none")
        if self.train.validate_bleu and not self.data.validates:
            raise RecipeError("train.validate_bleu: expected dev pairs to translate, got none")
        if self.train.test_bleu and not self.data.tests:
            raise RecipeError(
                "train.test_bleu: expected test pairs to translate, got none: set "
                "data.test_source=FILE and data.test_target=FILE, or train.test_bleu=false"
            )
        # The home of no user, which is not replaced.
        expected = "a folder, ./~NAME for one that begins with ~"
        expect(self.output[:1] not in ("", "~"), "output", expected, self.output)
        expect(self.resume != "", "resume", "true, false or a file", self.resume)

    def _check_memory(self, config: Any) -> None:
        stacks = isinstance(config, TransformerConfig)
        expect(stacks, "memory", "null for a model without memory policies", self.memory)
        unplanned = _not_planned(config)
        mixes = config.encoder_connection in MIXING
        named = [name for name in POLICIES if mixes or name != "history"]
        policy = f"a policy, one of {', '.join(named)}"
        if self.memory in POLICIES:
            expected = f"{policy}, if model.encoder_connection is {config.encoder_connection}"
            serves = self.memory in named or isinstance(config, DepthGrowingConfig)
            expect(serves, "memory", expected, self.memory)
        elif unplanned is not None:
            expected = f"{policy}, or null {unplanned}, which the planner cannot predict"
            expect(False, "memory", expected, self.memory)
        else:
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                expected = f"a size such as 24GiB, one of {', '.join(POLICIES)}, or null"
                raise RecipeError(
                    f"memory: expected {expected}, got {shown(self.memory)}"
                ) from error

    def planned(self) -> bool:
        """Whether the planner can predict the memory of this recipe's model."""
        return self.grow is None and _not_planned(self.model_config(vocab_size=8)) is None

    def model_config(
        self,
        vocab_size: int,
        padding_idx: int = 0,
        languages: dict[str, int] | None = None,
        target_vocab_size: int | None = None,
    ) -> Any:
        """The model's config for a vocabulary and the ids of the languages' tags in it.

        target_vocab_size: of separate vocabularies; None: ``vocab_size``.
        """
        options = dict(self.model)
        name, size = options.pop("kind", "transformer"), options.pop("size", None)
        expect(name in KINDS, "model.kind", f"one of {', '.join(KINDS)}", name)
        config = KINDS[name].Config
        sizes = SIZES if name == "transformer" else {}
        expected = f"one of {', '.join(sizes)} or null" if sizes else f"null for the kind {name}"
        expect(size is None or size in sizes, "model.size", expected, size)
        known = {field.name for field in fields(config)}
        unknown = sorted(options.keys() - (known - set(DERIVED_FIELDS)))
        if unknown:
            raise RecipeError(
                f"model.{unknown[0]}: expected a field of {config.__name__} that the "
                "vocabulary does not decide"
            )
        if self.data.separate:
            options["target_vocab_size"] = target_vocab_size or vocab_size
            if "share_embeddings" in known:
                shared = options.setdefault("share_embeddings", "decoder")
                expected = "decoder or none where source and target have their own vocabularies"
                expect(shared != "all", "model.share_embeddings", expected, shared)
        if languages and "languages" in known:
            options["languages"] = languages
        make = sizes.get(size, config)
        try:
            return make(vocab_size=vocab_size, padding_idx=padding_idx, **options)
        except ValueError as error:
            raise RecipeError(f"model.{str(error).removeprefix(f'{config.__name__}: ')}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as in a recipe file."""
        plain = asdict(self)
        for section in (plain["optim"], (plain["grow"] or {}).get("optim", {})):
            if "betas" in section:
                section["betas"] = list(section["betas"])
        latent = plain["model"].get("latent", {})
        if "beta" in latent:
            latent["beta"] = list(latent["beta"])
        return plain


def _not_planned(config: TransformerConfig) -> str | None:
    """What in a model the planner cannot predict, in words; None if it can predict everything."""
    if isinstance(config, DepthGrowingConfig):
        return "for a model that grows"
    for key, plain in (("cross_attention", "top"), ("share_embeddings", "all"),
                       ("encoder_fusion", None), ("decoder_fusion", None)):  # fmt: skip
        if getattr(config, key) != plain:
            return f"where model.{key} is {getattr(config, key)}"
    for key, unknown in (("encoder_connection", "mudd"), ("decoder_connection", "mudd"),
                         ("norm_kind", "none")):  # fmt: skip
        if getattr(config, key) == unknown:
            return f"where model.{key} is {getattr(config, key)}"
    return None
