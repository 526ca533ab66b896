"""A recipe: the sections of a training run, its model, and what must fit together.

`recipe_file` reads recipes from files and overrides.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from deepfast.checks import shown
from deepfast.memory.units import parse_bytes
from deepfast.mt.models import KINDS, DepthGrowingConfig, TransformerConfig, base, big
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.errors import RecipeError, expect
from deepfast.mt.training.sections import (
    DataSection,
    File,
    Folder,
    OptimSection,
    ParallelSection,
    Section,
    TrainSection,
    convert,
    field_types,
)
from deepfast.policies import MIXING, POLICIES

SIZES = {"base": base, "big": big}

PLANNED = {
    "cross_attention": ("top",), "share_embeddings": ("all",), "norm_type": ("layer", "rms"),
    "norm": ("pre", "post"), "decoder_norm": (None,),
    "encoder_fusion": (None,), "decoder_fusion": (None,),
}  # fmt: skip
"""Key of the section `model` -> the values whose memory the planner can predict."""


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
    recompute: Literal[POLICIES] | None = None  # type: ignore[valid-type]
    """What backward recomputes of each layer, one of `deepfast.memory.POLICIES`. None: "none", or
    what a plan chooses for `memory_budget`."""
    memory_budget: str | None = None
    """A size such as "24GiB": a plan chooses what backward recomputes of each layer, so that a step
    fits into it."""
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
    output: Folder = "runs/deepfast"
    """Folder for checkpoints and metrics. It must be empty or new, unless the run resumes."""
    resume: bool | File = False
    """True: continue from the newest checkpoint in `output`, or start where there is none. A path:
    continue from that checkpoint, in a new folder or, if no later one is there, in its own. The
    recipe may have changed, but not in what the run began with: its text, vocabulary, seed and
    model."""

    def __post_init__(self):
        for key, kind in field_types(Recipe).items():
            if key not in SECTIONS and key not in ("model", "grow"):
                setattr(self, key, convert(key, getattr(self, key), kind))
        # Refuses a model that cannot be built, before any data is read.
        config = self.model_config(vocab_size=8)
        self._check_recompute(config)
        if self.train.patience is not None and not self.data.validates:
            raise RecipeError("train.patience: expected dev pairs to validate on, got none")
        if self.train.validate_bleu and not self.data.validates:
            raise RecipeError("train.validate_bleu: expected dev pairs to translate, got none")
        if self.train.test_bleu and not self.data.tests:
            raise RecipeError(
                "train.test_bleu: expected test pairs to translate, got none: set "
                "data.test_source=FILE and data.test_target=FILE, or train.test_bleu=false"
            )

    def _check_recompute(self, config: Any) -> None:
        given = [name for name in ("recompute", "memory_budget") if getattr(self, name) is not None]
        if not given:
            return
        name = given[-1]
        expect(len(given) == 1, name, "null with recompute", self.memory_budget)
        stacks = isinstance(config, TransformerConfig)
        expect(stacks, name, "null for a model without recompute policies", getattr(self, name))
        mixes = config.encoder_connection in MIXING
        named = ", ".join(name for name in POLICIES if mixes or name != "layer+input")
        if name == "recompute":
            serves = (
                self.recompute != "layer+input" or mixes or isinstance(config, DepthGrowingConfig)
            )
            expected = f"one of {named}, if model.encoder_connection is {config.encoder_connection}"
            expect(serves, name, expected, self.recompute)
            return
        unplanned = _not_planned(config)
        expected = (
            f"null {unplanned}, which the planner cannot predict; set recompute to one of {named}"
        )
        expect(unplanned is None, name, expected, self.memory_budget)
        try:
            parse_bytes(self.memory_budget)
        except ValueError as error:
            got = shown(self.memory_budget)
            expected = "a size such as 24GiB, or null"
            raise RecipeError(f"memory_budget: expected {expected}, got {got}") from error

    @property
    def saves_memory(self) -> bool:
        """Whether a policy or a budget is given."""
        return self.recompute is not None or self.memory_budget is not None

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
        """Plain values only, as in a recipe file: lists for tuples."""
        return json.loads(json.dumps(asdict(self), default=str))


SECTIONS: dict[str, type[Section]] = {
    cls.name: cls for cls in (DataSection, OptimSection, TrainSection, ParallelSection)
}


def _not_planned(config: TransformerConfig) -> str | None:
    """What in a model the planner cannot predict, in words; None if it can predict everything."""
    if isinstance(config, DepthGrowingConfig):
        return "for a model that grows"
    for key, values in PLANNED.items():
        if getattr(config, key) not in values:
            return f"where model.{key} is {getattr(config, key)}"
    return None
