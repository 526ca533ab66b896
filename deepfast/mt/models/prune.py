"""A model without the layers that latent depth does not use (Li et al. 2020)."""

import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from deepfast.mt.models.interface import TranslationModel
from deepfast.mt.models.transformer_config import SIDES


def prune(model: TranslationModel, language: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """The config and the weights of a model without unused layers, whose outputs are the same bits.

    For one language it is a plain Transformer, for several ones a layer stays that any of them
    uses. Its source sentences begin with the same tags. Without a language, a model where nothing
    can be left out stays as it is: one without latent depth, with the evaluation "mean", which uses
    every layer, or with post-norm, which applies the norms of unused layers.

    Args:
        language: the one of the config's ``languages`` to keep; None: all.

    Raises:
        ValueError: nothing can be left out for a language, or the model does not know it.
    """
    config, weights = model.config, model.state_dict()
    sides = [side for side in SIDES if getattr(config, f"{side}_connection", None) == "latent"]
    pre = all(config.norm_of(side) == "pre" for side in sides)
    if not sides or not pre or config.latent.get("evaluation") == "mean":
        if language is None:
            return config, weights
        raise ValueError(
            "expected a pre-norm model with latent depth and latent.evaluation threshold for a "
            "language, got another"
        )
    names = list(config.languages)
    if language is not None and language not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"expected a language of the model ({known}), got {language!r}")
    chosen = range(len(names) or 1) if language is None else [names.index(language)]
    latent = dict(config.latent)
    changes: dict[str, Any] = {}
    for side in sides:
        used = [getattr(model, side).latent.keeps(index) for index in chosen]
        kept = [layer for layer, uses in enumerate(zip(*used, strict=True)) if any(uses)]
        alike = all(own == used[0] for own in used)
        weights = _without(weights, side, kept, alike)
        changes[f"{side}_layers"] = len(kept)
        if alike:
            changes[f"{side}_connection"] = "residual"
        elif latent.get("target_layers") is not None:
            # It must not exceed the number of layers that are left.
            latent["target_layers"] = min(latent["target_layers"], len(kept))
    latent_left = any(name.endswith(".latent.logits") for name in weights)
    changes["latent"] = latent if latent_left else {}
    if language is not None:
        changes["languages"] = {language: config.languages[language]}
    return replace(config, **changes), weights


def _without(
    weights: dict[str, Tensor], side: str, kept: list[int], alike: bool
) -> dict[str, Tensor]:
    """The weights with the layers of a side that are kept; ``alike``: without its logits."""
    logits = f"{side}.latent.logits"
    # A pre-norm stack has one norm more than layers: the final one.
    layers = [*kept, weights[logits].shape[1]]
    pruned = {}
    for name, weight in weights.items():
        found = re.fullmatch(rf"({side}\.(?:layers|connection\.norms))\.(\d+)\.(.*)", name)
        if found and int(found[2]) in layers:
            pruned[f"{found[1]}.{layers.index(int(found[2]))}.{found[3]}"] = weight
        elif name == "transparent.weight" and side == "decoder":
            # One mixture of the encoder's layers for each decoder layer.
            pruned[name] = weight[kept]
        elif name == logits and not alike:
            pruned[name] = weight[:, kept]
        elif not found and name != logits:
            pruned[name] = weight
    return pruned
