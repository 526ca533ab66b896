"""Puts a depth connection into a model that loops over its layers."""

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepfast import checks
from deepfast.attach.additive import AddedResiduals
from deepfast.attach.loop import CLASSES, Attachment
from deepfast.attach.passes import CONNECT_POLICIES, NAME, Current, Settings
from deepfast.attach.sublayers import OP, find_sublayers
from deepfast.depth.connection import DepthConnection
from deepfast.nn.connections.base import class_of
from deepfast.nn.connections.dlcl import dlcl_options
from deepfast.policies import ATTENTION_RESIDUALS, MIXING

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
        parameters on the device of the layers, in at least fp32, unless ``options`` say otherwise.

    Raises:
        TypeError, ValueError: for a parent that cannot be connected.

    In the forward pass a RuntimeError, ValueError or TypeError says what cannot be connected:
    sublayers that add something else than their last module returns, a layer that is skipped
    (LayerDrop) or runs twice, a loop over indices, nested tensors, and a layer whose output does
    not have the shape of its input. Where the first layer runs in training
    while the forward of ``parent`` does not, a warning says so once; not inside torch.compile.
    """
    kind = type(parent).__name__
    if not isinstance(parent, nn.Module):
        raise TypeError(f"{OP}: parent must be a module, got {kind}")
    checks.choice(OP, ("pre", "post", None), norm=norm)
    checks.choice(OP, MIXING, connection=connection)
    checks.choice(OP, CONNECT_POLICIES, recompute=recompute)
    checks.flag(OP, inplace=inplace)
    if dim is not None:
        checks.whole(OP, dim=dim)
    where, layer_list = _find_layers(parent, layers)
    parts = () if sublayers is None else find_sublayers([*layer_list], sublayers)
    attends, config = connection in ATTENTION_RESIDUALS, getattr(parent, "config", None)
    for holder in (parent, config):
        for name in ("layerdrop", "layer_drop"):
            _refuse(
                getattr(holder, name, 0),
                f"a depth connection needs every layer, but {type(holder).__name__}.{name} is "
                f"{getattr(holder, name, 0)}; set it to 0 first",
            )
    _refuse(attends and norm != "pre", f"{connection=} needs norm='pre', got {norm!r}")
    _refuse("reads" in options, f"reads is given by sublayers=, got {options}")
    _refuse(parts and not attends, f"sublayers needs attention residuals, got {connection=}")
    _refuse(additive is not None and not parts, f"{additive=} needs sublayers=, got None")
    _refuse(
        additive is not None and recompute == "layer+input",
        f"{additive=} keeps the input of every layer, its own sum; expected recompute='none' or "
        "'layer', got 'layer+input'",
    )
    useless = {"norm_type", "normalize_embedding"} & options.keys()
    _refuse(
        useless and not attends and dlcl_options(connection, norm, options)["norm"] is None,
        f"{connection=} has no layer-norms, got {', '.join(useless)}=",
    )
    first_norm = getattr(layer_list[0], "norm_first", None)
    if isinstance(first_norm, bool) and norm is not None and first_norm != (norm == "pre"):
        warnings.warn(
            f"{OP}: norm={norm!r} differs from the layers, which have norm_first={first_norm}",
            stacklevel=3,
        )
    if parts:
        options = options | {"reads": len(parts)}
    make: Any = class_of(connection).make_depth
    if additive is not None:
        make = functools.partial(make, kind=AddedResiduals)
        options = options | {"additive": additive}
    dim = _width(config, layer_list[0]) if dim is None else dim
    weight = next(layer_list.parameters(), None)
    if weight is not None:
        # In float32 even where the default dtype has 16 bits, as while transformers loads a model.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        options = {"device": weight.device, "dtype": dtype} | options
    made = make(connection, len(layer_list), dim, norm, options)
    parent.add_module(NAME, made.train(parent.training))
    settings = Settings(
        parent=kind,
        where=where,
        input_name=next(iter(inspect.signature(layer_list[0].forward).parameters), "hidden_states"),
        subtracts=attends,
        additive=additive is not None,
        recompute=recompute,
        inplace=inplace,
        sublayers=parts,
        known=sublayers == "auto",
        current=Current(),
        checked=set(),
    )
    Attachment(parent, layer_list, settings)
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
    """The attachment of `connect` to ``parent``."""
    attached = (vars(module).get("attachment") for module in parent.modules())
    mine = (a for a in attached if isinstance(a, Attachment) and a.parent is parent)
    return next(mine, None)


def _refuse(wrong: object, text: str) -> None:
    if wrong:
        raise ValueError(f"{OP}: {text}")


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _find_layers(parent: nn.Module, layers: str | None) -> tuple[str, Any]:
    """The list of layers, and its name for errors."""
    kind, children = type(parent).__name__, parent._modules
    _refuse(
        not _has_forward(parent),
        f"{kind} has no forward, so nothing would run the connection; pass the module whose "
        "forward loops over the layers, and the dotted name of their list, as in "
        "connect(model, 'transformer.h', ...)",
    )
    of_torch = type(parent).__module__.startswith("torch.")
    _refuse(
        of_torch and len(children) == 1 and WRAPPED & children.keys(),
        f"expected a model that is not wrapped, got one in {kind}; connect the model before you "
        "wrap it",
    )
    _refuse(NAME in children, f"{kind} is connected already; deepfast.disconnect it first")
    modules: dict[str | None, Any] = dict(parent.named_modules(remove_duplicate=False))
    lists = [name for name, m in modules.items() if isinstance(m, tuple(CLASSES))]
    if layers is None and type(parent) is nn.Sequential:
        layers = ""
    elif layers is None:
        names = [name for name in lists if name in children]
        names = [name for name in names if isinstance(modules[name], nn.ModuleList)] or names
        layers = names[0] if len(names) == 1 else None
    layer_list, where = modules.get(layers), f"{kind}.{layers}" if layers else kind
    _refuse(
        layer_list is None,
        f"expected layers= to name the list of layers over which the forward of {kind} loops, got "
        f"{layers!r}; its lists are {lists or 'none'}",
    )
    _refuse(type(layer_list) in CLASSES.values(), f"{where} is connected already")
    if type(layer_list) not in CLASSES:
        raise TypeError(
            f"{OP}: {where} must be an nn.ModuleList or nn.Sequential, not a subclass of one, got "
            f"{type(layer_list).__name__}"
        )
    first = next(iter(layer_list), None)
    _refuse(
        first is None or not _has_forward(first),
        f"{where} must be a list of layers that have a forward, got {type(first).__name__}s",
    )
    return where, layer_list


def _width(config: Any, layer: nn.Module) -> int:
    """D, from the config of the model or from the norms of a layer."""
    width = getattr(config, "hidden_size", None)
    if isinstance(width, int):
        return width
    weights = (getattr(m, "weight", None) for m in layer.modules() if "Norm" in type(m).__name__)
    widths = {len(w) for w in weights if isinstance(w, torch.Tensor) and w.dim() == 1}
    _refuse(
        len(widths) != 1,
        f"dim cannot be inferred from {type(layer).__name__}, whose norms have the widths "
        f"{sorted(widths)}; pass dim=",
    )
    return widths.pop()
