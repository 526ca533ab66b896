"""A model without the layers that latent depth does not use (Li et al. 2020)."""

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.models.fusions import without_unread
from deepfast.mt.models.transformer import Transformer
from deepfast.mt.models.transformer_config import TransformerConfig

SIDES = ("encoder", "decoder")

BRANCH_ENDS = ("attention.out", "cross_attention.out", "feed_forward.down")
"""Linear maps of a layer whose results its gate scales."""


def prune_layers(
    config: TransformerConfig, weights: dict[str, Tensor], language: str | None = None
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Leaves out every layer that is not used, and gives the same outputs.

    For one language what is left is a plain Transformer: a gate that is neither 0 nor 1 goes into
    the last weights of its branches, and the outputs agree up to rounding; without such gates to
    the bit. For several languages the layers that any of them uses stay, with their logits where
    the languages differ.

    Args:
        config, weights: of a model with latent depth, weights as in its state dict.
        language: one of ``config.languages``, for which alone the smaller model is; None: for all.

    Returns:
        Config and weights of the smaller model. Its source sentences begin with the same tags, and
        for one language it knows no other.

    Raises:
        ValueError: no side with latent depth, an unknown language, no layer left on a side, or a
            layer that would go from a post-norm model, whose layer-norms remain in evaluation.
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
        gates = [getattr(model, side).latent.choose(index) for index in chosen]
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
        # As many as there are now can be wanted at most.
        changes["latent"]["target_layers"] = min(wanted, *stay)
    return replace(config, **changes), weights


def _prune_side(
    config: TransformerConfig, weights: dict[str, Tensor], side: str, gates: list[list[float]]
) -> tuple[dict[str, Tensor], int]:
    """The weights without unused layers of one side, and how many are left of them; without logits
    where all languages have the same gates, which go into the weights."""
    layers = len(gates[0])
    kept = [index for index in range(layers) if any(own[index] for own in gates)]
    if not kept:
        raise ValueError(f"expected a layer that is used, got none in the {side}")
    if len(kept) < layers and config.norm == "post":
        raise ValueError(
            f"expected a pre-norm model, got a post-norm one, where the layer-norms of the "
            f"{layers - len(kept)} unused layers of the {side} stay"
        )
    # The last norm of a pre-norm stack follows its last layer.
    place = {old: new for new, old in enumerate((*kept, layers))}
    alike = all(own == gates[0] for own in gates)
    fold = gates[0] if alike else [1.0] * layers
    pruned = {}
    for name, weight in weights.items():
        start = next((p for p in (f"{side}.layers.", f"{side}.connection.norms.")
                      if name.startswith(p)), None)  # fmt: skip
        if start is not None:
            number, _, rest = name.removeprefix(start).partition(".")
            index = int(number)
            if index not in place:
                continue
            name = f"{start}{place[index]}.{rest}"
            if rest.rpartition(".")[0] in BRANCH_ENDS and fold[index] != 1:
                weight = weight * fold[index]
        elif name == f"{side}.latent.logits":
            if alike:
                continue
            weight = weight[:, kept]
        elif name == "transparent.weight" and side == "decoder":
            # A mixture of the encoder's layers for each of the decoder's.
            weight = weight[kept]
        pruned[name] = weight
    return pruned, len(kept)


def prune_checkpoint(content: dict[str, Any], language: str | None = None) -> dict[str, Any]:
    """A checkpoint's content, as `read_checkpoint` gives it, for the smaller model.

    The recipe stays as a record of how the model was trained; what resuming needs is left out.

    Raises:
        ValueError: see `prune_layers`; or a checkpoint of another kind of model.
    """
    kind = content.get("kind", "transformer")
    if kind != "transformer":
        raise ValueError(f"expected a model of the kind transformer, got {kind!r}")
    config = TransformerConfig(**without_unread(content["config"]))
    config, weights = prune_layers(config, content["model"], language)
    left = {key: value for key, value in content.items() if key != "training"}
    return left | {"kind": kind, "config": asdict(config), "model": weights}
