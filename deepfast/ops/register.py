"""Registers an op with torch, so that its own machinery works on it.

A registered op has a schema, a fake implementation, autograd, an autocast rule and a FLOP formula:
`torch.compile`, selective checkpointing, FLOP counters and export see one op and no Python. The
dispatcher's Python wrappers cost tens of microseconds a call, so plain eager code takes a bare
`torch.autograd.Function` over the same functions; whatever watches or traces is shown the op.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from deepfast.ops.common import bare_apply, first_order

LIBRARY = torch.library.Library("deepfast", "FRAGMENT")

_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _intercepted() -> bool:
    """Whether a mode wants to see ops; one with ``sees_through`` wants what they are made of."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and not all(
        getattr(torch._C._get_dispatch_stack_at(i), "sees_through", False) for i in range(depth)
    )


def watched(x: Tensor) -> bool:
    """Whether something traces or intercepts ops on ``x``."""
    return (
        torch.compiler.is_compiling()
        or _intercepted()
        or torch._C._are_functorch_transforms_active()
        or type(x) not in _PLAIN
    )


def no_flops(*_, **__) -> int:
    """The count of an op without matrix products, as torch counts."""
    return 0


def _as_tuple(results) -> tuple[Tensor, ...]:
    """The results of an op, of which a schema with one alone makes no tuple."""
    return (results,) if isinstance(results, Tensor) else results


def _node(name: str, forward: Callable, setup: Callable, backward: Callable, public: int):
    """The op as a bare autograd node.

    A node takes no list of tensors; one stands first in the schema and is laid out flat, its
    length in front.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, count, *args):
            inputs = args if count is None else (list(args[:count]), *args[count:])
            outputs = _as_tuple(forward(*inputs))
            ctx.set_materialize_grads(False)
            setup(ctx, inputs, outputs)
            ctx.count, ctx.bare = count, True
            return outputs[:public]

        @staticmethod
        def backward(ctx, *grads):
            before, count = ctx.needs_input_grad, ctx.count
            flat = before[1:]
            try:
                # As torch.library has it: one entry for a list.
                ctx.needs_input_grad = flat if count is None else (flat[:count], *flat[count:])
                grads = backward(ctx, *grads)
            finally:
                ctx.needs_input_grad = before
            return (None, *grads) if count is None else (None, *grads[0], *grads[1:])

    Node.__name__ = Node.__qualname__ = name
    return bare_apply(Node)


def _autocast_rule(op, cast: Callable, device_type: str) -> None:
    """``cast(*args)`` gives the arguments as autocast wants them."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")

    def rule(*args):
        args = cast(*args)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*args)

    # For tracing modes, which ask Python for the rule, and for the dispatcher.
    op.py_impl(key)(rule)
    LIBRARY.impl(op._schema.name.split("::")[1], rule, key.name)


def _without_autograd(op, forward: Callable, *args):
    """An op that only backward calls, with the dtypes it is given."""
    first = args[0][0] if isinstance(args[0], list) else args[0]
    if watched(first):
        return op(*args)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return forward(*args)


def register(
    schema: str,
    forward: Callable,
    *,
    fake: Callable,
    flops: Callable,
    cast: Callable | None = None,
    setup: Callable | None = None,
    backward: Callable | None = None,
    public: int = 1,
    raw_flops: bool = False,
) -> Callable:
    """Defines ``deepfast::<schema>`` and returns the function that calls it.

    Args:
        schema: functional; a list of tensors may only stand first.
        forward: (*args) to a tuple of tensors, or to the one tensor that the schema has, on real
            tensors of any device.
        fake: the same on fake ones.
        flops: (*argument shapes, out_shape=...) to multiplications and additions, counted as torch
            counts: matrix products alone. With ``raw_flops`` it gets the arguments themselves.
        cast: (*args) to args under autocast.
        setup, backward: ``setup(ctx, inputs, results)`` with results a tuple, and both else as in
            `torch.library.register_autograd`; ``inputs`` holds a list where the schema has one, and
            ``backward`` may get fewer gradients than there are results, and None for each.
            ``ctx.bare`` is set in plain eager code, where nobody else has the results that are not
            public.
        public: results beyond these are for backward only; the returned function leaves them out.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepfast::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.deepfast, name)
    register_flop_formula(packet, get_raw=raw_flops)(flops)
    if cast is not None:
        for device_type in ("cpu", "cuda"):
            _autocast_rule(packet.default, cast, device_type)
    if backward is None:
        return partial(_without_autograd, packet.default, forward)

    backward = first_order(name)(backward)

    def registered_setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        output = _as_tuple(output)
        ctx.mark_non_differentiable(*output[public:])
        ctx.bare = False
        setup(ctx, inputs, output)

    torch.library.register_autograd(
        f"deepfast::{name}", backward, setup_context=registered_setup, lib=LIBRARY
    )
    apply = _node(name, forward, setup, backward, public)

    def call(*args) -> tuple[Tensor, ...]:
        if forward_ad._current_level >= 0:
            raise NotImplementedError(f"{name}: forward-mode differentiation is not supported")
        listed = isinstance(args[0], list)
        if watched(args[0][0] if listed else args[0]):
            return _as_tuple(packet.default(*args))[:public]
        if not torch._C._is_any_autocast_enabled():
            return eager(args, listed)
        if cast is not None:
            args = cast(*args)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return eager(args, listed)

    def eager(args, listed: bool) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return _as_tuple(forward(*args))[:public]
        if listed:
            return apply(len(args[0]), *args[0], *args[1:])
        return apply(None, *args)

    return call
