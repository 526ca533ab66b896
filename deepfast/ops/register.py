"""Registers ops with torch, so that torch's tools work on them.

A registered op has a schema, a fake implementation, autograd, an autocast rule, a FLOP formula and
a decomposition into torch's ops.
`torch.compile`, selective checkpointing, FLOP counters and export then see one op and no Python.
The dispatcher's Python wrappers cost tens of microseconds per call. So plain eager code calls a
bare `torch.autograd.Function` over the same functions; modes and tracers get the registered op.

An op's functions get its operands as one named tuple, built from the schema, and return gradients
by the operands' names. No function depends on positions.
"""

import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

from deepfast import backend
from deepfast.launches import LAUNCHES, Launch
from deepfast.ops import common

LIBRARY = torch.library.Library("deepfast", "FRAGMENT")

_PLAIN = (Tensor, torch.nn.Parameter)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _intercepted() -> bool:
    """Whether a dispatch mode must see our ops. One with ``sees_through`` sees the ops inside."""
    depth = torch._C._len_torch_dispatch_stack()
    return not all(
        getattr(torch._C._get_dispatch_stack_at(i), "sees_through", False) for i in range(depth)
    )


def watched(x: Tensor) -> bool:
    """Whether something traces, intercepts or transforms ops on ``x``, or ``x`` has no data."""
    return (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() > 0 and _intercepted())
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or type(x) not in _PLAIN
        or x.is_meta
    )


def no_flops(_) -> int:
    """0: torch counts matrix products only, and the op has none."""
    return 0


def _as_tuple(results) -> tuple:
    """The results of an op as a tuple, also where the schema has a single one."""
    return (results,) if isinstance(results, Tensor) else results


def _first(args: tuple) -> Tensor:
    """The first operand, or the first tensor of the list that it is."""
    return args[0][0] if isinstance(args[0], list) else args[0]


class Op(Protocol):
    """What `register` returns."""

    operands: Any
    """The named tuples of its operands and of its results."""
    results: Any
    gradient_of: list[str]
    """Of the op of a gradient, the operands that its results belong to."""

    def __call__(self, *args: Any, **named: Any) -> tuple: ...


class _Autograd:
    """Setup and backward of an op, shared by the bare node and the registered op."""

    def __init__(self, op, operands, results, setup, backward):
        self.name, self.operands, self.results = operands.__name__, operands, results
        self.setup, self.differentiate = setup, backward
        types = [str(argument.type) for argument in op._schema.arguments]
        self.places = [i for i, kind in enumerate(types) if "Tensor" in kind]
        """Which operands are tensors."""
        self.has_list = types[0] == "List[Tensor]"
        needs = namedtuple("needs", [operands._fields[i] for i in self.places])  # type: ignore[misc]
        self.needs: Any = needs
        self.backward = common.first_order(self.name)(self._backward)

    def tensors(self, given: tuple) -> list[Tensor | None]:
        """The tensors among the operands; a list of tensors, which comes first, one by one."""
        found = [given[i] for i in self.places]
        return [*found[0], *found[1:]] if self.has_list else found

    def save(self, ctx, given: tuple, results: tuple, bare: bool) -> None:
        ctx.set_materialize_grads(False)
        ctx.bare, ctx.listed, flat = bare, None, ()
        kept = self.setup(ctx, given, self.results(*results))
        if self.has_list:
            ctx.listed = next((name for name, x in kept.items() if isinstance(x, list)), None)
            flat = kept.pop(ctx.listed, ())
        ctx.names = [name for name, x in kept.items() if isinstance(x, Tensor)]
        ctx.save_for_backward(*map(kept.pop, ctx.names), *flat)
        ctx.options = kept

    def _kept(self, ctx) -> dict:
        tensors = ctx.saved_tensors
        kept = ctx.options | dict(zip(ctx.names, tensors, strict=False))
        if ctx.listed is not None:
            kept[ctx.listed] = list(tensors[len(ctx.names) :])
        return kept

    def _backward(self, ctx, needs, grads: tuple) -> list:
        """The gradients of the tensors among the operands, in their order. Autograd casts them to
        the operands' dtypes.

        needs: whether each of them needs one; of a list of tensors a list.
        """
        ctx.needs, found = self.needs(*needs), {}
        for grad in grads:
            if grad is not None:
                found = self.differentiate(ctx, self._kept(ctx), self.results(*grads))
                break
        ordered = []
        for name, need in zip(self.needs._fields, needs, strict=True):
            grad = found.pop(name, None)
            ordered.append(grad if need else None)
        if found:
            raise TypeError(f"{self.name}: no tensor is named {', '.join(found)}")
        if self.has_list and not ordered[0]:
            ordered[0] = [None] * len(needs[0])
        return ordered


def _node(forward: Callable, autograd: _Autograd, public: int):
    """The op as a bare autograd node.

    It gets all operands as one and, for autograd, each tensor among them.
    """

    @common.traced_as(autograd.name)
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, *_tensors):
            results = _as_tuple(forward(given))
            autograd.save(ctx, given, results, bare=True)
            return results[:public]

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad[1:]
            if not autograd.has_list:
                return None, *autograd.backward(ctx, needs, grads)
            count = len(needs) - len(autograd.places) + 1
            first, *rest = autograd.backward(ctx, (needs[:count], *needs[count:]), grads)
            return None, *first, *rest

    return common.bare_apply(Node)


def _autocast(given, names: tuple[str, ...]) -> tuple:
    """``given`` with the operands ``names`` cast for autocast."""
    changed: dict[str, Any] = {}
    for name in names:
        x = getattr(given, name)
        if isinstance(x, list):
            changed[name] = list(common.autocast(*x))
        elif x is not None:
            (changed[name],) = common.autocast(x)
    return given._replace(**changed)


def _autocast_rule(op, operands, names: tuple[str, ...], device_type: str) -> None:
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")

    def rule(*args):
        args = _autocast(operands._make(args), names)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*args)

    # Registered twice: tracing modes look the rule up in Python, the dispatcher in its own table.
    op.py_impl(key)(rule)
    LIBRARY.impl(op._schema.name.split("::")[1], rule, key.name)


def _define(schema: str) -> tuple:
    """The op's packet, and named tuples of its operands and of its results."""
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    packet = getattr(torch.ops.deepfast, name)
    found = packet.default._schema
    # mypy wants to read the names in the source.
    operands = namedtuple(name, [argument.name for argument in found.arguments])  # type: ignore[misc]
    names = [result.name or "out" for result in found.returns]
    # Of the results only public ones have gradients; those of the others are None.
    results = namedtuple(f"{name}_results", names, defaults=[None] * len(names))  # type: ignore[misc]
    return packet, operands, results


def register(
    schema: str,
    forward: Callable,
    *,
    fake: Callable,
    flops: Callable,
    cast: tuple[str, ...] = (),
    setup: Callable | None = None,
    backward: Callable | None = None,
    plain: Callable | None = None,
    public: int | None = None,
    raw_flops: bool = False,
) -> Op:
    """Defines ``deepfast::<schema>`` and returns the function that calls it.

    The function takes the operands by position or by name and returns a tuple. Its ``operands``
    and ``results`` are the named tuple types that the functions below get.

    Args:
        schema: a functional schema. Only the first operand may be a list of tensors.
        forward: (operands) -> a tuple of tensors, or one tensor where the schema has one result.
            It runs on real tensors of any device. A result that nobody needs may be None; the
            registered op returns an empty tensor in its place.
        fake: the same for fake tensors.
        flops: (operands as shapes) -> multiplications and additions of the matrix products, as
            torch counts them. With ``raw_flops`` it gets the operands themselves.
        cast: names of the operands that autocast casts.
        setup: (ctx, operands, results) -> what backward needs, by name: tensors, options and at
            most one list of tensors. ``ctx.bare`` is True in plain eager code, where no other code
            holds the results that are not public.
        backward: (ctx, kept, grads) -> the gradients, by the operands' names; a missing one is
            None. It runs where a public result has a gradient. ``kept`` is what setup returned,
            ``grads`` has the results' gradients by name, and ``ctx.needs`` says by name which
            operands need one. None for an op without autograd.
        plain: (operands) -> the public results, by torch's ops alone, for exported programs that
            are decomposed; needed with backward.
        public: how many results the returned function returns; the others are for backward only.
    """
    packet, operands, results = _define(schema)
    op, name = packet.default, operands.__name__
    autograd = _Autograd(op, operands, results, setup, backward) if backward else None

    def complete(function: Callable) -> Callable:
        """``function`` of the operands in order, with an empty tensor for a missing result."""

        def run(*args):
            results, like = function(operands._make(args)), _first(args)
            if isinstance(results, Tensor):
                return results
            return tuple(like.new_empty(0) if x is None else x for x in results)

        return run

    LIBRARY.impl(name, complete(forward), "CompositeExplicitAutograd")
    fake = complete(fake)
    torch.library.register_fake(f"deepfast::{name}", fake, lib=LIBRARY)
    register_flop_formula(packet, get_raw=raw_flops)(
        lambda *args, out_shape=None, out_val=None, **named: flops(operands(*args, **named))
    )
    if autograd:
        # Also where nothing is cast: inside the op autocast must not change the products.
        for device_type in ("cpu", "cuda"):
            _autocast_rule(op, operands, cast, device_type)
        _register_autograd(autograd, public)
        _register_decomposition(op, operands, plain, fake)
    call = _caller(op, operands, forward, autograd, cast, public)
    call.operands, call.results = operands, results
    call.gradient_of = [result[1:] for result in results._fields]
    return call


def _caller(op, operands: type, forward, autograd: _Autograd | None, cast, public) -> Any:
    """The function that calls the bare node in plain eager code, else the registered op."""
    node = _node(forward, autograd, public) if autograd else None

    def eager(given) -> tuple:
        if node is not None and torch.is_grad_enabled():
            tensors = autograd.tensors(given)
            for x in tensors:
                if x is not None and x.requires_grad:
                    return node(given, *tensors)
        return _as_tuple(forward(given))[:public]

    def call(*args, **named) -> tuple[Tensor, ...]:
        given = operands(*args, **named)
        if watched(_first(given)):
            if node is not None:
                common.reverse_mode_only(autograd.name)
            return _as_tuple(op(*given))[:public]
        if not torch._C._is_any_autocast_enabled():
            return eager(given)
        given = _autocast(given, cast)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return eager(given)

    return call


def _register_autograd(autograd: _Autograd, public: int | None) -> None:
    def setup(ctx, inputs, output):
        results = _as_tuple(output)
        if public is not None:
            ctx.mark_non_differentiable(*results[public:])
        autograd.save(ctx, autograd.operands._make(inputs), results, bare=False)

    def backward(ctx, *grads):
        needs = [ctx.needs_input_grad[i] for i in autograd.places]
        found = dict(zip(autograd.places, autograd.backward(ctx, needs, grads), strict=True))
        return tuple(map(found.get, range(len(ctx.needs_input_grad))))

    torch.library.register_autograd(
        f"deepfast::{autograd.name}", backward, setup_context=setup, lib=LIBRARY
    )


def _decomposing(mode: ProxyTorchDispatchMode) -> bool:
    """Whether ``mode`` traces for `ExportedProgram.run_decompositions` with torch's own table.

    With an empty table, or one for a few ops, a program keeps our ops. AOTInductor also exports
    with torch's table, but it calls our kernels.
    """
    if not torch.compiler.is_exporting():
        return False
    # Older versions of torch have the table in a global variable.
    table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", None)
    table = mode.decomposition_table if table is None else table
    inductor = sys.modules.get("torch._inductor.virtualized")
    # Reversed subtraction is not a core op: every table that decomposes all of torch has it.
    return torch.ops.aten.rsub.Tensor in table and not (inductor and inductor.V.aot_compilation)


def _register_decomposition(op, operands: type, plain: Callable, fake: Callable) -> None:
    """Makes ``op`` decompose into ``plain`` in exported programs, for ONNX and other runtimes.

    By default torch decomposes only ops of a library without kernels and without autograd of their
    own. Ours have both. So a rule for torch's tracing mode decomposes them, and does so in no other
    trace: compilers keep the ops, and eager code never meets the rule.
    """

    def rule(mode, func, types, args, kwargs):
        if not _decomposing(mode):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        with mode:
            given = operands(*args, **kwargs)
            results = plain(given)
            if len(op._schema.returns) == 1:
                return results
            # What only backward reads is NaN here.
            rest = fake(*given)[len(results) :]
            return *results, *(torch.full_like(x, torch.nan) for x in rest)

    torch.library.register_torch_dispatch(
        op._schema.name, ProxyTorchDispatchMode, rule, lib=LIBRARY
    )


def gradients(op: Op, ctx, kept: dict, **grads) -> dict:
    """The gradients of an op's operands by name; the registered op ``op`` computes them.

    op: takes ``kept``, ``grads`` and ``wants``, which says for each result whether to compute it.
        Its results have the names of the operands with a d in front.
    """
    wants = []
    for name in op.gradient_of:
        need = getattr(ctx.needs, name)
        wants.append(need if isinstance(need, bool) else any(need))
    return dict(zip(op.gradient_of, op(**kept, **grads, wants=wants), strict=True))


def launch_flops(launch: Launch) -> Callable:
    def count(*args, out_shape=None, **named) -> int:
        return launch.flops(**dict(zip(launch.names, args, strict=False)), **named)

    return count


def _register_launches() -> None:
    """Registers the fakes of the compiled launches, which return nothing, and their FLOPs."""
    if not backend.compiled():
        return
    torch.library.register_fake("deepfast::advise_states", lambda _states: None)
    for name, launch in LAUNCHES.items():
        torch.library.register_fake(f"deepfast::{name}", lambda *_, **__: None)
        register_flop_formula(getattr(torch.ops.deepfast, name))(launch_flops(launch))


_register_launches()
