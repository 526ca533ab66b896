"""A model without the layers that latent depth does not use (Li et al. 2020)."""

import re
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.models.transformer import Transformer
from deepfast.mt.models.transformer_config import SIDES, TransformerConfig

BRANCH_ENDS = ("attention.out", "cross_attention.out", "feed_forward.down")
"""The linear maps of a layer whose results its gate scales."""


def prune_layers(
    config: TransformerConfig, weights: dict[str, Tensor], language: str | None = None
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Removes every layer whose probability is below the threshold of latent depth.

    With the evaluation "threshold" those layers are not used: the smaller model gives the same
    outputs. With "mean" they had small weights: the outputs change by their part.

    For one language it is a plain Transformer: a gate that is neither 0 nor 1 is multiplied into
    the last weights of its layer's branches. The outputs are then equal up to rounding; without
    such gates they are equal to the bit. For several languages the layers that any language uses
    stay; where the languages differ, so do the logits.

    Args:
        config, weights: of a model with latent depth; the weights as in its state dict.
        language: keep the layers of this one of ``config.languages``; None: of all.

    Returns:
        Config and weights of the smaller model. Its source sentences begin with the same tags. A
        model for one language knows only that language.

    Raises:
        ValueError: no side has latent depth, the language is unknown, no layer of a side would be
            left, or a post-norm model would lose a layer (it applies the norms of unused layers).
    """
    connections = {side: getattr(config, f"{side}_connection") for side in SIDES}
    latent = [side for side in SIDES if connections[side] == "latent"]
    if not latent:
        raise ValueError("expected a model with latent depth, got one without")
    names = list(config.languages)
    if language is not None and language not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"expected a language of the model ({known}), got {language!r}")
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    chosen = range(len(names) or 1) if language is None else [names.index(language)]
    changes: dict[str, Any] = {}
    for side in latent:
        depth = getattr(model, side).latent
        # z of each layer that stays, and 0.0 for the others.
        gates = [
            [z if kept else 0.0 for z, kept in zip(depth.choose(i), depth.keeps(i), strict=True)]
            for i in chosen
        ]
        weights, left = _prune_side(config, weights, side, gates)
        changes[f"{side}_layers"] = left
        if f"{side}.latent.logits" not in weights:
            changes[f"{side}_connection"] = "residual"
    if language is not None:
        changes["languages"] = {language: config.languages[language]}
    stay = [changes[f"{s}_layers"] for s in latent if f"{s}.latent.logits" in weights]
    wanted = config.latent.get("target_layers")
    changes["latent"] = dict(config.latent) if stay else {}
    if stay and wanted is not None:
        # The target must not exceed the number of layers that are left.
        changes["latent"]["target_layers"] = min(wanted, *stay)
    return replace(config, **changes), weights


def _prune_side(
    config: TransformerConfig, weights: dict[str, Tensor], side: str, gates: list[list[float]]
) -> tuple[dict[str, Tensor], int]:
    """The weights without a side's unused layers, and the number of its layers that are left.

    If all languages have the same gates, the gates go into the weights and the logits are removed.
    """
    layers = len(gates[0])
    kept = [index for index in range(layers) if any(own[index] for own in gates)]
    if not kept:
        raise ValueError(f"expected a layer that is used, got none in the {side}")
    if len(kept) < layers and config.norm_of(side) == "post":
        raise ValueError(
            f"expected a pre-norm model, got a post-norm one, where the layer-norms of the "
            f"{layers - len(kept)} unused layers of the {side} stay"
        )
    # A pre-norm stack has one norm more than layers: the final one.
    place = {old: new for new, old in enumerate((*kept, layers))}
    alike = all(own == gates[0] for own in gates)
    fold = gates[0] if alike else [1.0] * layers
    pruned = {}
    for name, weight in weights.items():
        found = re.fullmatch(rf"({side}\.(?:layers|connection\.norms))\.(\d+)\.(.*)", name)
        if found:
            start, index, rest = found[1], int(found[2]), found[3]
            if index not in place:
                continue
            name = f"{start}.{place[index]}.{rest}"
            if rest.rpartition(".")[0] in BRANCH_ENDS and fold[index] != 1:
                weight = weight * fold[index]
        elif name == f"{side}.latent.logits":
            if alike:
                continue
            weight = weight[:, kept]
        elif name == "transparent.weight" and side == "decoder":
            # One mixture of the encoder's layers for each decoder layer.
            weight = weight[kept]
        pruned[name] = weight
    return pruned, len(kept)


def prune_checkpoint(content: dict[str, Any], language: str | None = None) -> dict[str, Any]:
    """The smaller model's checkpoint, from what `load_checkpoint` read.

    Raises:
        ValueError: see `prune_layers`; or the checkpoint is of another kind of model.
    """
    if content["kind"] != "transformer":
        raise ValueError(f"expected a model of the kind transformer, got {content['kind']!r}")
    config = TransformerConfig(**content["config"])
    config, weights = prune_layers(config, content["model"], language)
    return content | {"config": asdict(config), "model": weights}
