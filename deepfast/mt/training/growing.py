"""Depth growing in training: a recipe with a section `grow` is two runs, one after the other.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019. The first run trains a
Transformer until it converges. The second run freezes it and trains layers on top of it, with its
own step counter, schedule and optimizer. Each run has its own folder in the recipe's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from deepfast.mt.models import DepthGrowingConfig, TransformerConfig, TranslationModel
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.checkpoint import check_config, load_checkpoint, load_weights
from deepfast.mt.training.errors import CheckpointError, RecipeError
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.run_folder import BEST, checkpoint_to_resume, step_checkpoints

FIRST, SECOND = "stage1", "stage2"
"""The folders of the two runs."""

TOP_FIELDS = tuple(
    field.name
    for field in fields(DepthGrowingConfig)
    if field.name not in {field.name for field in fields(TransformerConfig)}
)
"""Fields of the config that only the top has."""


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
    _expect_keys("grow", grow, ("from", "model", "optim", "train"))
    _expect_keys("grow.model", grow.get("model", {}), TOP_FIELDS)
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


def _expect_keys(section: str, given: dict[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RecipeError(
            f"{section}.{unknown[0]}: expected one of {', '.join(known)}: the first run decides "
            "everything else"
        )


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
    if recipe.grow.get("from"):
        return [second]
    if isinstance(recipe.resume, str):
        begun = load_checkpoint(recipe.resume).get("kind") == "depth_growing"
        second = second if begun else replace(second, resume=False)
    else:
        begun = recipe.resume and bool(step_checkpoints(second.output))
    if begun:
        return [second]
    # Checked now, not after hours of the first run.
    checkpoint_to_resume(second.output, second.resume)
    return [first, second]


def stage(recipe: Recipe, run: Recipe) -> str | None:
    """Which of the recipe's two runs this is, in words; None where there is only one run."""
    if run == recipe or recipe.grow.get("from"):
        return None
    config = run.model_config(vocab_size=8)
    if run.grow is None:
        layers = _layers(config.encoder_layers, config.decoder_layers)
        return f"stage 1 of 2: {layers}, into {run.output}"
    layers = _layers(config.top_encoder_layers, config.top_decoder_layers)
    return (
        f"stage 2 of 2: {layers} on top of {run.grow['from']}, which is frozen, into {run.output}"
    )


def _layers(encoder: int, decoder: int) -> str:
    return f"{encoder} encoder and {decoder} decoder layer{'' if decoder == 1 else 's'}"


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
    lowercase = content["recipe"]["data"].get("lowercase", False)
    if lowercase != recipe.data.lowercase:
        raise CheckpointError(
            f"{path}: expected a model of text with data.lowercase={recipe.data.lowercase}, got "
            f"one with {lowercase}"
        )
    load_weights(model.bottom, content["model"], path)
