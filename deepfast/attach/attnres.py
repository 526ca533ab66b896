"""Attention residuals of a connected model by the names that others' checkpoints have.

Row r of `deepfast.nn.AttentionResiduals` is the read of sublayer r: with two reads a layer, rows 2i
and 2i + 1 stand before attention and feed-forward block of layer i, and the last row behind the
last layer. In the checkpoints each read has a query ``*_proj.weight`` (1, D) and a gain
``*_norm.weight`` (D), that of the RMSNorm in the scores.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.attach.additive import AddedResiduals
from deepfast.attach.parent import attachment_of
from deepfast.attach.passes import NAME
from deepfast.depth.attention_residuals import AttentionResiduals

NAMES = {
    "fla": ("attn_res", "mlp_res", "res"),
    "k3": ("self_attention_res", "mlp_res", "output_attn_res"),
}
"""The reads in checkpoints: those of a layer, in their order, and the one behind the last layer.
fla: flash-linear-attention. k3: Kimi K3, in transformers."""
WANTED = {
    "reads": 2,
    "norm_affine": True,
    "additive": False,
    "scale": 1,
    "score_function": "softmax",
    "window": None,
}
"""The options of attention residuals with such a checkpoint."""


class Place(NamedTuple):
    """The attention residuals of a model."""

    parent: str
    """The name of the connected module, with a dot behind it, or nothing."""
    layers: str
    """The name of its list of layers."""
    residuals: AttentionResiduals

    def rows(self, names: str) -> list[str]:
        """The name of each row's read, one of `NAMES` being ``names``."""
        *sublayers, last = NAMES[names]
        layers = range(self.residuals.num_layers)
        reads = [f"{self.layers}.{i}.{name}" for i in layers for name in sublayers]
        return [*reads, f"{self.parent}{last}"]


def _place(op: str, model: nn.Module) -> Place:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a module, got {type(model).__name__}")
    names = {module: name for name, module in model.named_modules()}
    parents = [m for m in names if isinstance(m._modules.get(NAME), AttentionResiduals)]
    parents = [m for m in parents if attachment_of(m) is not None]
    if len(parents) != 1:
        raise ValueError(
            f"{op}: expected a {type(model).__name__} with one deepfast.connect, with "
            f"connection='attnres' and sublayers=, got {len(parents)}"
        )
    residuals: Any = parents[0]._modules[NAME]
    options = {name: getattr(residuals, name, None) for name in WANTED} | {
        "norm_affine": residuals.norm_weight is not None,
        "additive": isinstance(residuals, AddedResiduals),
    }
    if options != WANTED:
        raise ValueError(f"{op}: expected {WANTED}, as these checkpoints have, got {options}")
    start = names[parents[0]]
    return Place(f"{start}." if start else "", names[attachment_of(parents[0]).layers], residuals)


def attnres_options(config: Any) -> dict:
    """The arguments of `deepfast.connect` that a config with attention residuals asks for.

    ::

        deepfast.connect(model.model, norm="pre", sublayers=..., **deepfast.attnres_options(config))

    Args:
        config: an object or a dict, with ``attnres_block_size`` (fla: sublayers in a block, 1 for
            the full form) or ``attn_res_block_size`` (Kimi K3: layers in a block), and with
            ``norm_eps`` or ``rms_norm_eps``.

    Raises:
        ValueError: for a config without attention residuals, or for an odd number of sublayers in
            a block.
    """
    op, sublayers, layers = "deepfast.attnres_options", "attnres_block_size", "attn_res_block_size"
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    names = "rms_norm_eps", "norm_eps", sublayers, layers
    given = {name: get(name, None) for name in names if get(name, None) is not None}
    eps = [given.pop(name) for name in names[:2] if name in given]
    if len(given) != 1 or not eps:
        raise ValueError(
            f"{op}: expected a config with either {sublayers} or {layers}, and with norm_eps or "
            f"rms_norm_eps, got {given} and eps {eps}"
        )
    checks.whole(op, **given)
    options: dict = {"norm_affine": True, "eps": eps[0]}
    if given == {sublayers: 1}:
        return options | {"connection": "attnres"}
    if given.get(sublayers, 0) % 2:
        raise ValueError(
            f"{op}: {sublayers} must be 1 or even, because a block has whole layers here, got "
            f"{given[sublayers]}"
        )
    block = given[layers] if layers in given else given[sublayers] // 2
    return options | {"connection": "block_attnres", "block": block}


@torch.no_grad()
def load_attnres(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a checkpoint with attention residuals into a connected model.

    The names in it tell its kind: fla's ``layers.{i}.attn_res_proj``, ``attn_res_norm``,
    ``mlp_res_proj``, ``mlp_res_norm`` and ``res_proj``, ``res_norm`` of the model, or Kimi K3's
    ``self_attention_res_*``, ``mlp_res_*`` and ``output_attn_res_*``. All other entries go to
    ``model.load_state_dict``. The reads are checked before anything is loaded.

    Args:
        model: connected by `deepfast.connect` with the options of `attnres_options`.
        state_dict: that of a whole model.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: for a model without attention residuals of this kind; for entries that are
            missing or have another shape.
        RuntimeError: from ``load_state_dict``.

    Sources: flash-linear-attention (fla), Kimi K3's model in transformers.
    """
    op = "deepfast.load_attnres"
    place, state = _place(op, model), dict(state_dict)
    start, dim = f"{place.parent}{NAME}.", place.residuals.dim
    parts = {"query": ("proj", (1, dim)), "norm_weight": ("norm", (dim,))}

    def keys(names: str, part: str) -> list[str]:
        return [f"{row}_{part}.weight" for row in place.rows(names)]

    names = max(NAMES, key=lambda names: len(state.keys() & keys(names, "proj")))
    if not state.keys() & keys(names, "proj"):
        raise ValueError(
            f"{op}: expected the names of {' or '.join(NAMES)}, such as {keys('fla', 'proj')[0]}; "
            "the checkpoint has none of them"
        )
    if second := [key for key in state if key.startswith(start)]:
        raise ValueError(f"{op}: the checkpoint has the reads under two names, also {second[0]}")
    for target, (part, shape) in parts.items():
        values = []
        for key in keys(names, part):
            if key not in state:
                raise ValueError(f"{op}: the checkpoint has no {key}")
            values.append(state.pop(key))
            if tuple(values[-1].shape) != shape:
                raise ValueError(f"{op}: {key} must be {shape}, got {tuple(values[-1].shape)}")
        state[start + target] = torch.stack(values).view(-1, dim)
    model.load_state_dict(state)


def attnres_state_dict(model: nn.Module, names: str) -> dict[str, Tensor]:
    """The ``state_dict`` of a connected model, its attention residuals by the names of others.

    Args:
        model: see `load_attnres`.
        names: "fla" or "k3".

    Returns:
        Copies of the rows, and the other entries as ``model.state_dict()`` has them.

    Raises:
        TypeError, ValueError: as `load_attnres`.
    """
    op = "deepfast.attnres_state_dict"
    checks.choice(op, tuple(NAMES), names=names)
    place, state = _place(op, model), dict(model.state_dict())
    start = f"{place.parent}{NAME}."
    queries, gains = state.pop(f"{start}query"), state.pop(f"{start}norm_weight")
    for name, query, gain in zip(place.rows(names), queries, gains, strict=True):
        state[f"{name}_proj.weight"] = query.unsqueeze(0).clone()
        state[f"{name}_norm.weight"] = gain.clone()
    return state
