"""Attention residuals of a connected model by the names that others' checkpoints have.

Row r of `deepfast.nn.AttentionResiduals` is the read of sublayer r: with two reads a layer, rows 2i
and 2i + 1 stand before attention and feed-forward block of layer i, and the last row behind the
last layer. In the checkpoints each read has a query ``*_proj.weight`` (1, D) and a gain
``*_norm.weight`` (D), that of the RMSNorm in the scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.attach.additive import AddedResiduals
from deepfast.attach.parent import attachment_of
from deepfast.attach.passes import NAME
from deepfast.depth.attention_residuals import AttentionResiduals

OP = "deepfast.load_attnres"


@dataclass(frozen=True)
class Names:
    """The names of the reads in a checkpoint."""

    sublayers: tuple[str, ...]
    """Those of a layer, in their order."""
    last: str
    """The one behind the last layer."""

    def rows(self, place: "Place") -> list[str]:
        """The name of each row's read."""
        layers = range(place.residuals.num_layers)
        found = [f"{place.layers}.{i}.{name}" for i in layers for name in self.sublayers]
        return [*found, f"{place.parent}{self.last}"]

    def keys(self, place: "Place") -> set[str]:
        rows = self.rows(place)
        return {f"{row}_{part}.weight" for row in rows for part in ("proj", "norm")}


NAMES = {
    "fla": Names(("attn_res", "mlp_res"), "res"),
    "k3": Names(("self_attention_res", "mlp_res"), "output_attn_res"),
}
"""fla: flash-linear-attention. k3: Kimi K3, in transformers."""


@dataclass(frozen=True)
class Place:
    """Attention residuals in a model."""

    parent: str
    """The name of the connected module, with a dot behind it, or nothing."""
    layers: str
    """The name of its list of layers."""
    residuals: AttentionResiduals


def _places(op: str, model: nn.Module) -> list[Place]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a module, got {type(model).__name__}")
    names = {module: name for name, module in model.named_modules()}
    found = []
    for parent, name in names.items():
        residuals = parent._modules.get(NAME)
        if not isinstance(residuals, AttentionResiduals):
            continue
        attachment = attachment_of(parent)
        if attachment is not None:
            start = f"{name}." if name else ""
            found.append(Place(start, names[attachment.layers], residuals))
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no attention residuals; deepfast.connect it first, "
            "with connection='attnres' and sublayers="
        )
    for place in found:
        if place.residuals.reads != 2 or place.residuals.norm_weight is None:
            raise ValueError(
                f"{op}: expected two reads a layer and norm_affine=True, as these checkpoints "
                f"have, got reads={place.residuals.reads} and "
                f"norm_affine={place.residuals.norm_weight is not None}"
            )
        if isinstance(place.residuals, AddedResiduals):
            raise ValueError(f"{op}: expected additive=None, which these checkpoints do not have")
        for name, value in (("scale", 1), ("score_function", "softmax"), ("window", None)):
            if getattr(place.residuals, name) != value:
                raise ValueError(
                    f"{op}: expected {name}={value!r}, as these checkpoints have, got "
                    f"{getattr(place.residuals, name)!r}"
                )
    return found


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
    names = "norm_eps", "rms_norm_eps", "attnres_block_size", "attn_res_block_size"
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    given = {name: get(name, None) for name in names}
    found: dict = {"norm_affine": True}
    for name in ("norm_eps", "rms_norm_eps"):
        if given[name] is not None:
            found["eps"] = given[name]
    sublayers, layers = given["attnres_block_size"], given["attn_res_block_size"]
    if sublayers is not None and layers is not None:
        raise ValueError(
            "deepfast.attnres_options: expected attnres_block_size or attn_res_block_size, got both"
        )
    if sublayers is None and layers is None:
        raise ValueError(
            "deepfast.attnres_options: expected a config with attnres_block_size or "
            "attn_res_block_size, got neither"
        )
    if "eps" not in found:
        raise ValueError(
            "deepfast.attnres_options: expected a config with norm_eps or rms_norm_eps, got neither"
        )
    sizes = {"attnres_block_size": sublayers, "attn_res_block_size": layers}
    checks.whole("deepfast.attnres_options", **{n: s for n, s in sizes.items() if s is not None})
    if sublayers == 1:
        return found | {"connection": "attnres"}
    if sublayers is not None and sublayers % 2:
        raise ValueError(
            "deepfast.attnres_options: attnres_block_size must be 1 or even, because a block has "
            f"whole layers here, got {sublayers}"
        )
    return found | {"connection": "block_attnres", "block": layers or sublayers // 2}


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
    places = _places(OP, model)
    rest, loaded = dict(state_dict), dict[str, Tensor]()
    for place in places:
        kind = max(NAMES.values(), key=lambda names: len(names.keys(place) & rest.keys()))
        if not kind.keys(place) & rest.keys():
            raise ValueError(
                f"{OP}: expected the names of {' or '.join(NAMES)}, such as "
                f"{NAMES['fla'].rows(place)[0]}_proj.weight; the checkpoint has none of them"
            )
        rows: dict[str, list[Tensor]] = {"query": [], "norm_weight": []}
        dim = place.residuals.dim
        for name in kind.rows(place):
            for target, key, shape in (
                ("query", f"{name}_proj.weight", (1, dim)),
                ("norm_weight", f"{name}_norm.weight", (dim,)),
            ):
                value = rest.pop(key, None)
                if value is None:
                    raise ValueError(f"{OP}: the checkpoint has no {key}")
                if tuple(value.shape) != shape:
                    raise ValueError(f"{OP}: {key} must be {shape}, got {tuple(value.shape)}")
                rows[target].append(value.reshape(dim))
        start = f"{place.parent}{NAME}."
        if own := [key for key in rest if key.startswith(start)]:
            raise ValueError(f"{OP}: the checkpoint has the reads under two names, also {own[0]}")
        loaded |= {start + target: torch.stack(values) for target, values in rows.items()}
    model.load_state_dict(rest | loaded)


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
    found = dict(model.state_dict()) if isinstance(model, nn.Module) else {}
    for place in _places(op, model):
        start = f"{place.parent}{NAME}."
        queries, gains = (found.pop(start + name) for name in ("query", "norm_weight"))
        for name, query, gain in zip(NAMES[names].rows(place), queries, gains, strict=True):
            found[f"{name}_proj.weight"] = query.unsqueeze(0).clone()
            found[f"{name}_norm.weight"] = gain.clone()
    return found
