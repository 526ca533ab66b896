"""Puts a depth connection into a model that loops over its layers."""

import inspect
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepfast import checks
from deepfast.attach.additive import AddedResiduals
from deepfast.attach.loop import CLASSES, Attachment
from deepfast.attach.passes import NAME, POLICIES, Running, Settings
from deepfast.attach.sublayers import find
from deepfast.connections import CONNECTIONS
from deepfast.depth.connection import DepthConnection
from deepfast.memory.policies import ATTENTION_RESIDUALS, MIXING
from deepfast.nn.connections.base import class_of
from deepfast.nn.connections.dlcl import dlcl_options

OP = "deepfast.connect"
WRAPPED = {"_orig_mod", "module", "_fsdp_wrapped_module"}
"""The only child of torch's wrappers: of torch.compile, of DataParallel and its kind, of FSDP."""


def connect(
    parent: nn.Module,
    layers: str | None = None,
    *,
    norm: str | None,
    connection: str = "dlcl",
    dim: int | None = None,
    recompute: str = "none",
    inplace: bool = True,
    sublayers: str | Sequence[tuple] | None = None,
    additive: str | None = None,
    **options,
) -> DepthConnection:
    """Puts a depth connection between the layers that ``parent`` loops over.

    ::

        deepfast.connect(model.bert.encoder, norm="post")

    The forward of ``parent`` must iterate over one list of layers and pass on, from layer to layer,
    a tensor, or a tuple that begins with one. The connection becomes the child
    ``depth_connection`` of ``parent``: optimizers, ``state_dict``, DDP and FSDP see it, and no
    other name changes. Connect a model before it is wrapped, compiled as a whole or given to an
    optimizer. `disconnect` undoes it.

    Args:
        parent: has the list of layers. An nn.Sequential may be the list itself.
        layers: name of the list in ``parent``, an nn.ModuleList or nn.Sequential; dotted where the
            list lies deeper, as in "transformer.h"; None where ``parent`` has only one.
        norm: where the layers have their norms: "pre" (before their sublayers) or "post" (after
            each residual sum); None for a DLCL without layer-norms. A warning is given if a layer
            has torch's ``norm_first`` with the other value.
        connection: "dlcl", "denseformer", "attnres" or "block_attnres"; the last two need
            norm="pre". "denseformer" begins as the plain model, and so do attention
            residuals with ``score_function="relu"`` and without a window, up to rounding.
        dim: D; None takes it from the model's config, or from the norms of its first layer.
        recompute: what autograd keeps of a layer, besides its state: "none": what the layer keeps;
            "layer": its input, from which backward runs the layer again; "layer+input": nothing,
            the input is recomputed from the states. The gradients are the same. The last two
            replace activation checkpointing.
        inplace: whether backward may overwrite states with gradients. False keeps the states, at
            twice their memory, so that a second backward through one pass works, as in
            ``torch.autograd.grad(..., retain_graph=True)`` for several losses.
        sublayers: with attention residuals, a read for each sublayer of a layer, as published, and
            not only one for each layer. A pair (norm, last module) of names in the layer for each
            of its sublayers, as in ``(("norm1", "attn"), ("norm2", "mlp"))``. The read is the
            norm's input, and what the last module returns is what the sublayer adds to the
            residual. With None in its place the sublayer adds the difference of the layer's sums
            after and before it. With a tuple of norms, sublayers side by side share one read.
            "auto" takes the names of known layers of transformers, timm and torch.
        additive: with ``sublayers``, what a norm gets is the layer's own sum h plus the read,
            ``h + gamma_r * sum_k p_rk v_k``. "gated": gamma (rows,) is learned and begins at 0, so
            that a pretrained model begins as itself, bit for bit; "one": gamma is 1. None: the read
            alone.
        options: arguments of `deepfast.nn.DLCL` or `deepfast.nn.AttentionResiduals`.

    Returns:
        The connection, a `deepfast.nn.DLCL` or `deepfast.nn.AttentionResiduals`, with its
        parameters on the device of the layers.

    Raises:
        TypeError, ValueError: for a parent that cannot be connected.

    In the forward pass a RuntimeError, ValueError or TypeError says what cannot be connected:
    sublayers that add something else than their last module returns, a layer that is skipped
    (LayerDrop) or runs twice, a loop over indices, nested tensors, and a layer whose output does
    not have the shape of its input. Where the first layer runs in training
    while the forward of ``parent`` does not, a warning says so once; not inside torch.compile.
    """
    if not isinstance(parent, nn.Module):
        raise TypeError(f"{OP}: parent must be a module, got {type(parent).__name__}")
    if getattr(parent.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"{OP}: {type(parent).__name__} has no forward, so nothing would run the connection; "
            "pass the module whose forward loops over the layers, and the dotted name of their "
            "list, as in connect(model, 'transformer.h', ...)"
        )
    checks.choice(OP, ("pre", "post", None), norm=norm)
    checks.choice(OP, MIXING, connection=connection)
    checks.choice(OP, POLICIES, recompute=recompute)
    checks.flag(OP, inplace=inplace)
    if dim is not None:
        checks.whole(OP, dim=dim)
    of_torch = type(parent).__module__.startswith("torch.")
    if of_torch and len(parent._modules) == 1 and WRAPPED & parent._modules.keys():
        raise ValueError(
            f"{OP}: expected a model that is not wrapped, got one in {type(parent).__name__}; "
            "connect the model before you wrap it"
        )
    where, found = _find_layers(parent, layers)
    parts = () if sublayers is None else find([*found], sublayers)
    for holder in (parent, getattr(parent, "config", None)):
        for name in ("layerdrop", "layer_drop"):
            if getattr(holder, name, 0):
                raise ValueError(
                    f"{OP}: {type(holder).__name__}.{name} is {getattr(holder, name)}; a depth "
                    "connection needs every layer, so set it to 0 first"
                )
    first_norm = getattr(found[0], "norm_first", None)
    if isinstance(first_norm, bool) and norm is not None and first_norm != (norm == "pre"):
        warnings.warn(
            f"{OP}: norm={norm!r} differs from the layers, which have norm_first={first_norm}",
            stacklevel=3,
        )
    dim = _width(parent, found[0]) if dim is None else dim
    if additive is not None:
        if not parts:
            raise ValueError(f"{OP}: additive={additive!r} needs sublayers=, got None")
        if recompute == "layer+input":
            raise ValueError(
                f"{OP}: {additive=} keeps the input of every layer, its own sum; expected "
                "recompute='none' or 'layer', got 'layer+input'"
            )
        options = options | {"additive": additive}
    made = _make(len(found), dim, norm, connection, options, len(parts))
    weight = next(found.parameters(), None)
    if weight is not None:
        # In float32 even where the default dtype has 16 bits, as while transformers loads a model.
        made.to(weight.device, torch.promote_types(torch.get_default_dtype(), torch.float32))
    parent.add_module(NAME, made.train(parent.training))
    settings = Settings(
        parent=type(parent).__name__,
        where=where,
        input_name=next(iter(inspect.signature(found[0].forward).parameters), "hidden_states"),
        subtracts=connection in ATTENTION_RESIDUALS,
        additive=additive is not None,
        recompute=recompute,
        inplace=inplace,
        sublayers=parts,
        known=sublayers == "auto",
        running=Running(),
        checked=set(),
    )
    Attachment(parent, found, settings)
    return made


def disconnect(parent: nn.Module) -> None:
    """Undoes `connect`: ``parent`` is again the module that it was.

    Raises:
        TypeError: if ``parent`` is not a module.
        ValueError: if it is not connected.
    """
    if not isinstance(parent, nn.Module):
        raise TypeError(f"deepfast.disconnect: expected a module, got {type(parent).__name__}")
    attachment = attachment_of(parent)
    if attachment is None:
        below = [name for name, m in parent.named_modules() if NAME in m._modules]
        raise ValueError(
            f"deepfast.disconnect: {type(parent).__name__} is not connected"
            + (f"; disconnect its {', '.join(below)}" if below else "")
        )
    attachment.remove()
    # The user may have deleted it.
    parent._modules.pop(NAME, None)


def attachment_of(parent: nn.Module) -> Attachment | None:
    """What `connect` has attached to ``parent``."""
    found = (vars(module).get("attachment") for module in parent.modules())
    mine = (a for a in found if isinstance(a, Attachment) and a.parent is parent)
    return next(mine, None)


def _find_layers(parent: nn.Module, layers: str | None) -> tuple[str, Any]:
    """The list of layers, and its name for errors."""
    kind = type(parent).__name__
    if NAME in parent._modules:
        raise ValueError(f"{OP}: {kind} is connected already; deepfast.disconnect it first")
    if layers is not None:
        if not isinstance(layers, str):
            raise TypeError(f"{OP}: layers must be the name of a list in {kind}, got {layers!r}")
        found: Any = parent
        for name in layers.split("."):
            found = getattr(found, name, None)
        where = f"{kind}.{layers}"
        if found is None:
            there = [name for name, m in parent.named_modules() if type(m) in CLASSES]
            raise ValueError(f"{OP}: {kind} has no {layers}; its lists are {there or 'none'}")
    elif type(parent) is nn.Sequential:
        found, where = parent, kind
    else:
        lists: dict[str, Any] = {}
        for list_type in CLASSES:
            children = parent.named_children()
            lists = lists or {name: m for name, m in children if isinstance(m, list_type)}
        if len(lists) != 1:
            deeper = [name for name, m in parent.named_modules() if type(m) in CLASSES]
            example = f", as in layers={deeper[0]!r}" if deeper else ""
            raise ValueError(
                f"{OP}: {kind} must have one list of layers, got {sorted(lists) or 'none'}; "
                "pass the module whose forward loops over them and, if it has several lists or its "
                f"list is in a submodule, the name of the list{example}"
            )
        name, found = next(iter(lists.items()))
        where = f"{kind}.{name}"
    if type(found) in CLASSES.values():
        raise ValueError(f"{OP}: {where} is connected already")
    if type(found) not in CLASSES:
        raise TypeError(
            f"{OP}: {where} must be an nn.ModuleList or nn.Sequential, not a subclass of one, got "
            f"{type(found).__name__}"
        )
    if len(found) == 0:
        raise ValueError(f"{OP}: {where} has no layers")
    if getattr(found[0].forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            f"{OP}: {where} must be a list of layers, got one of {type(found[0]).__name__}s, which "
            "have no forward"
        )
    return where, found


def _width(parent: nn.Module, layer: nn.Module) -> int:
    """D, from the config of the model or from the norms of a layer."""
    width = getattr(getattr(parent, "config", None), "hidden_size", None)
    if isinstance(width, int):
        return width
    weights = (getattr(m, "weight", None) for m in layer.modules() if "Norm" in type(m).__name__)
    widths = {len(w) for w in weights if isinstance(w, torch.Tensor) and w.dim() == 1}
    if len(widths) != 1:
        found = f"norms of widths {sorted(widths)}" if widths else "no norms"
        raise ValueError(
            f"{OP}: dim cannot be inferred from {type(layer).__name__}, which has {found}; "
            "pass dim="
        )
    return widths.pop()


def _make(
    layers: int, dim: int, norm: str | None, connection: str, options: dict, reads: int
) -> DepthConnection:
    """The connection. reads: those of a layer; 0 where nothing is said about its sublayers."""
    if CONNECTIONS[connection].pre_norm and norm != "pre":
        raise ValueError(f"{OP}: connection={connection!r} needs norm='pre', got {norm!r}")
    if "reads" in options:
        raise ValueError(
            f"{OP}: expected sublayers= in place of reads=, got reads={options['reads']!r}"
        )
    if reads and connection not in ATTENTION_RESIDUALS:
        raise ValueError(
            f"{OP}: sublayers needs attention residuals, which read for each sublayer, got "
            f"connection={connection!r}"
        )
    if reads:
        options = options | {"reads": reads}
    if CONNECTIONS[connection].dlcl is not None:
        useless = {"norm_type", "normalize_embedding"} & options.keys()
        if useless and dlcl_options(connection, norm, options)["norm"] is None:
            raise ValueError(
                f"{OP}: connection={connection!r} has no layer-norms, got {', '.join(useless)}="
            )
    make = class_of(connection).make_depth
    if "additive" in options:
        make = partial(make, kind=AddedResiduals)
    return make(connection, layers, dim, norm, options)
