"""Depth growing in training: a recipe with a section `grow` is two runs, one after the other.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019. The first run trains a
Transformer until it converges. The second run freezes it and trains layers on top of it, with its
own step counter, schedule and optimizer. Each run has its own folder in the recipe's output.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from deepfast.mt.models import DepthGrowingConfig, TransformerConfig
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.errors import RecipeError, expect
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.run_folder import BEST, checkpoint_to_resume

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
    fits = recipe.data.validates or grow.get("from")
    expect(fits, "grow", "dev pairs, to find the best checkpoint of the first run", grow)
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
        return [recipe]
    first = replace(recipe, grow=None, output=str(Path(recipe.output) / FIRST))
    second = second_run(recipe)
    # The second run's folder is checked before the hours of the first run.
    begun = checkpoint_to_resume(second.output, second.resume)
    return [second] if begun or recipe.grow.get("from") else [first, second]
