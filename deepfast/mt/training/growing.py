"""Depth growing in training: a recipe with a section `grow` is two runs, one after the other.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019. The first run trains a
Transformer until it converges. The second run freezes it and trains layers on top of it, with its
own step counter, schedule and optimizer. Each run has its own folder in the recipe's output.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepfast.mt.models import DepthGrowingConfig, TransformerConfig, TranslationModel
from deepfast.mt.models.checkpoint import check_config, load_checkpoint
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.errors import CheckpointError, RecipeError
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.run_folder import (
    BEST,
    checkpoint_to_resume,
    read_start,
    step_checkpoints,
)

FIRST, SECOND = "stage1", "stage2"
"""The folders of the two runs."""


def check_grow(recipe: Recipe) -> None:
    """Refuses a recipe whose second run could not begin.

    Raises:
        RecipeError: the section `grow` does not fit the rest of the recipe.
    """
    grow, config = recipe.grow, recipe.model_config(vocab_size=8)
    if isinstance(config, DepthGrowingConfig):
        if grow is None or set(grow) != {"from"} or not grow["from"]:
            raise RecipeError(
                "model.kind: expected transformer with a section grow, or depth_growing with "
                f"only grow.from=CHECKPOINT, got depth_growing with grow {grow!r}"
            )
        return
    if grow is None:
        return
    if type(config) is not TransformerConfig:
        raise RecipeError(f"grow: expected a model of the kind transformer, got {recipe.model!r}")
    if not (grow.get("from") or recipe.data.validates):
        raise RecipeError(
            "grow: expected dev pairs, to find the best checkpoint of the first run, or "
            "grow.from, got neither"
        )
    try:
        second_run(recipe)
    except RecipeError as error:
        inside = str(error).startswith(("model.", "optim.", "train"))
        raise RecipeError(f"grow.{error}" if inside else str(error)) from error


def second_run(recipe: Recipe) -> Recipe:
    """The recipe of the second run: that of the first with the values of the section `grow`."""
    grow, folder = recipe.grow, Path(recipe.output)
    bottom = asdict(recipe.model_config(vocab_size=8))
    model = {name: value for name, value in bottom.items() if name not in DERIVED_FIELDS}
    return replace(
        recipe,
        model=model | {"kind": "depth_growing"} | grow.get("model", {}),
        optim=replace(recipe.optim, **grow.get("optim", {})),
        train=replace(recipe.train, **grow.get("train", {})),
        grow={"from": grow.get("from") or str(folder / FIRST / BEST)},
        output=str(folder / SECOND),
    )


def runs(recipe: Recipe) -> list[Recipe]:
    """The runs that are left to make or to continue, in order; without growing the recipe itself.

    Raises:
        RecipeError: see `check_grow`.
        CheckpointError: the folder of either run holds another run.
    """
    check_grow(recipe)
    if recipe.grow is None or recipe.model.get("kind") == "depth_growing":
        return [_continued(recipe)]
    first = replace(recipe, grow=None, output=str(Path(recipe.output) / FIRST))
    second = second_run(recipe)
    if recipe.grow.get("from"):
        return [_continued(second)]
    if isinstance(recipe.resume, str):
        # A run removes its old steps, so the file may be gone when torchrun starts it again.
        gone = restarts() and not Path(recipe.resume).exists()
        if not gone and read_start(Path(recipe.resume))["kind"] == "depth_growing":
            return [_continued(second)]
        second = replace(second, resume=False)
    first, second = _continued(first), _continued(second)
    if second.resume is True and step_checkpoints(second.output):
        return [second]
    # Checked now, not after hours of the first run.
    checkpoint_to_resume(second.output, second.resume)
    return [first, second]


def _continued(run: Recipe) -> Recipe:
    """The run that goes on from its own newest checkpoint, where torchrun has started the ranks
    again."""
    begun = not isinstance(run.resume, str) or bool(step_checkpoints(run.output))
    return replace(run, resume=True) if restarts() and begun else run


def stage(recipe: Recipe, run: Recipe) -> str | None:
    """Which of the recipe's two runs this is, in words; None where there is only one run."""
    if recipe.grow is None or recipe.grow.get("from"):
        return None
    return f"stage {1 if run.grow is None else 2} of 2, into {run.output}"


def read_bottom(recipe: Recipe) -> dict[str, Any] | None:
    """The content of the checkpoint that a run grows on; None for a run that does not grow."""
    return None if recipe.grow is None else load_checkpoint(recipe.grow["from"])


def load_bottom(recipe: Recipe, model: TranslationModel, content: dict[str, Any]) -> None:
    """Puts a trained Transformer under a `DepthGrowing`.

    Raises:
        CheckpointError: its kind or sizes are not the recipe's, or it was trained on text of
            another case.
    """
    path = recipe.grow["from"]
    check_config(path, content, model.bottom.config)
    lowercase = content["recipe"]["data"]["lowercase"]
    if lowercase != recipe.data.lowercase:
        raise CheckpointError(
            f"{path}: expected a model of text with data.lowercase={recipe.data.lowercase}, got "
            f"one with {lowercase}"
        )
    model.bottom.load_state_dict(content["model"])
