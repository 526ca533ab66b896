"""A recipe: the sections of a training run, its model, and what must fit together.

`recipe_file` reads recipes from files and overrides.
"""

from __future__ import annotations

import json
from dataclasses import asdict, field, fields
from typing import Annotated, Any

from typing_extensions import TypedDict

from deepfast.memory.units import parse_bytes
from deepfast.mt.checked import STRICT, Checked, Field, Options, checked, one_of, pydantic
from deepfast.mt.models import KINDS, DepthGrowingConfig, TransformerConfig, base, big
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.errors import RecipeError, expect
from deepfast.mt.training.sections import (
    DataSection,
    DecodeSection,
    File,
    Folder,
    OptimSection,
    ParallelSection,
    TrainSection,
)
from deepfast.policies import POLICIES

SIZES = {"base": base, "big": big}

SECTIONS: dict[str, type] = {
    "data": DataSection,
    "optim": OptimSection,
    "train": TrainSection,
    "decode": DecodeSection,
    "parallel": ParallelSection,
}

PLANNED: dict[str, tuple] = {
    "cross_attention": ("top",),
    "share_embeddings": ("all",),
    "norm_type": ("layer", "rms"),
    "norm": ("pre", "post"),
    "decoder_norm": (None,),
    "encoder_fusion": (None,),
    "decoder_fusion": (None,),
}
"""Key of the section `model` -> the values whose memory the planner can predict."""


def _budget(given: str) -> str:
    """Text that `parse_bytes` reads."""
    parse_bytes(given)
    return given


Budget = Annotated[str, pydantic.AfterValidator(_budget), Field(description="a size such as 24GiB")]
TOP_FIELDS = [*DepthGrowingConfig.__annotations__]
"""Fields of the config that only the top of a model that grows has."""

Grow = TypedDict(
    "Grow",
    {"from": File | None, "model": Options, "optim": Options, "train": Options},
    total=False,
)
pydantic.with_config(STRICT)(Grow)


@checked("", RecipeError)
class Recipe(Checked):
    """A whole training run: `deepfast.mt.training.train(recipe)`."""

    data: DataSection
    """Text, vocabulary and batches."""
    model: Options = field(default_factory=dict)
    """Fields of the model's config. Also `kind`, one of deepfast.mt.models.KINDS, by default
    "transformer"; and for a transformer `size`, "base" or "big", which sets other defaults."""
    optim: OptimSection = field(default_factory=OptimSection)
    """Adam, its schedule, and the loss."""
    train: TrainSection = field(default_factory=TrainSection)
    """How long, how, and what to keep."""
    decode: DecodeSection = field(default_factory=DecodeSection)
    """How the run's own translations are found, and those from its checkpoints."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    """How the ranks share the model, under torchrun."""
    recompute: Annotated[str, one_of(POLICIES)] | None = None
    """What backward recomputes of each layer, one of `deepfast.memory.POLICIES`. None: "none", or
    what a plan chooses for `memory_budget`."""
    memory_budget: Budget | None = None
    """A size such as "24GiB": a plan chooses what backward recomputes of each layer, so that a step
    fits into it."""
    grow: Annotated[Grow, Field(description="keys and values")] | None = None
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
    resume: bool = False
    """Continue from the newest checkpoint in `output`, or start where there is none. The recipe may
    have changed, but not in what the run began with: its text, vocabulary, seed and model."""

    def __post_init__(self):
        # Refuses a model that cannot be built, before any data is read.
        self._check_recompute(self.model_config(vocab_size=8))
        expected = f"one of {', '.join(TOP_FIELDS)}: the first run decides everything else"
        for key, value in ((self.grow or {}).get("model") or {}).items():
            expect(key in TOP_FIELDS, f"grow.model.{key}", expected, value)
        has = {"dev": self.data.validates, "test": self.data.tests}
        for key, part in (("patience", "dev"), ("validate_bleu", "dev"), ("test_bleu", "test")):
            given = getattr(self.train, key)
            files = f"data.{part}_source=FILE and data.{part}_target=FILE"
            expected = f"null or false without {part} pairs, which {files} add"
            expect(has[part] or not given, f"train.{key}", expected, given)

    def _check_recompute(self, config: Any) -> None:
        name = "recompute" if self.memory_budget is None else "memory_budget"
        if self.saves_memory:
            self.expect(None in (self.recompute, self.memory_budget), name, "null with recompute")
            stacks = isinstance(config, TransformerConfig)
            self.expect(stacks, name, "null for a model without recompute policies")
            where = _not_planned(config)
            expected = f"null {where}, which the planner cannot predict; set recompute instead"
            self.expect(where is None or name == "recompute", name, expected)

    @property
    def saves_memory(self) -> bool:
        """Whether a policy or a budget is given."""
        return self.recompute is not None or self.memory_budget is not None

    def model_config(
        self,
        vocab_size: int,
        languages: dict[str, int] | None = None,
        target_vocab_size: int | None = None,
    ) -> Any:
        """The model's config for a vocabulary and the ids of the languages' tags in it.

        target_vocab_size: of separate vocabularies; None: ``vocab_size``.
        """
        options = dict(self.model)
        name, size = options.pop("kind", "transformer"), options.pop("size", None)
        expect(name in [*KINDS], "model.kind", f"one of {', '.join(KINDS)}", name)
        config = KINDS[name].Config
        sizes = {None: config} | (SIZES if name == "transformer" else {})
        words = ", ".join(each or "null" for each in sizes)
        expect(size in [*sizes], "model.size", f"one of {words} for the kind {name}", size)
        known = {field.name for field in fields(config)}
        for key in DERIVED_FIELDS:
            expect(key not in options, f"model.{key}", "no value: the vocabulary decides it",
                   options.get(key))  # fmt: skip
        if self.data.separate:
            options["target_vocab_size"] = target_vocab_size or vocab_size
            if "share_embeddings" in known:
                shared = options.setdefault("share_embeddings", "decoder")
                expected = "decoder or none where source and target have their own vocabularies"
                expect(shared != "all", "model.share_embeddings", expected, shared)
        if languages and "languages" in known:
            options["languages"] = languages
        try:
            return sizes[size](vocab_size=vocab_size, **options)
        except ValueError as error:
            raise RecipeError(f"model.{str(error).removeprefix(f'{config.__name__}: ')}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as in a recipe file: lists for tuples."""
        return json.loads(json.dumps(asdict(self), default=str))


def _not_planned(config: TransformerConfig) -> str | None:
    """What in a model the planner cannot predict, in words; None if it can predict everything."""
    if isinstance(config, DepthGrowingConfig):
        return "for a model that grows"
    for key, values in PLANNED.items():
        if getattr(config, key) not in values:
            return f"where model.{key} is {getattr(config, key)}"
    return None
