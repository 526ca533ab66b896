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
from dataclasses import dataclass
from typing import Any

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


def _seen_through(x: Tensor) -> bool:
    """Whether x is a tensor without data of a mode that sees the ops inside ours, as the memory
    planner's: the bare node then allocates what it does with data, and its launches do nothing."""
    return getattr(getattr(x, "fake_mode", None), "sees_through", False)


def _as_tuple(results) -> tuple:
    """The results of an op as a tuple, also where the schema has a single one."""
    return results if isinstance(results, tuple) else (results,)


@dataclass(eq=False)
class Op:
    """The op ``deepfast::<schema>``, registered with torch.

    A call takes the operands by position or by name and returns a tuple of the public results.
    Under autocast the caller has cast the operands.
    """

    schema: str
    """A functional schema. Only the first operand may be a list of tensors."""
    forward: Callable
    """(operands) -> a tuple of tensors, or one tensor where the schema has one result. It runs on
    real tensors of any device, and on fake ones, where its launches do nothing
    (`common.launches`). A result that nobody needs may be None; the registered op returns an empty
    tensor in its place."""
    fake: Callable | None = None
    """The same for fake tensors, where ``forward`` cannot run on them."""
    flops: Callable = lambda operands: 0
    """(operands) -> multiplications and additions of the matrix products, as torch counts them;
    0 for an op without."""
    cast: tuple[str, ...] = ()
    """Names of the operands that autocast casts; the first is a tensor."""
    grad: "Op | None" = None
    """The op that computes the gradients. Its operands have the names of those of the operands and
    results that it reads, or a d before the name of a result for the gradient of this result.
    ``wants`` says for each of its own results whether to compute it; these have the names of the
    operands with a d before."""
    setup: Callable | None = None
    """(ctx, operands, results) -> tensors or None, by name, which backward gets besides the
    operands and results that ``grad`` reads, or in their place. ``ctx.bare`` is True in plain eager
    code, where no other code holds the results that are not public."""
    backward: Callable | None = None
    """(op, ctx, kept, grads) -> the gradients, by the operands' names; a missing one is None. It
    runs where a public result has a gradient. ``kept`` is what was saved, by name, ``grads`` has
    the results' gradients by name, and ``ctx.needs`` says by name which operands need one. None is
    `gradients`."""
    plain: Callable | None = None
    """(operands) -> the public results, by torch's ops alone, for exported programs that are
    decomposed; needed with autograd."""
    public: int | None = None
    """How many results a call returns; the others are for backward only."""

    def __post_init__(self) -> None:
        self.name = name = self.schema.split("(")[0]
        LIBRARY.define(self.schema, tags=torch.Tag.pt2_compliant_tag)
        packet = getattr(torch.ops.deepfast, name)
        self.registered = packet.default
        arguments, returns = self.registered._schema.arguments, self.registered._schema.returns
        # mypy wants to read the names in the source.
        self.operands: Any = namedtuple(name, [x.name for x in arguments])  # type: ignore[misc]
        names = [x.name or "out" for x in returns]
        # Of the results only public ones have gradients; those of the others are None.
        self.results: Any = namedtuple(  # type: ignore[misc]
            f"{name}_results", names, defaults=[None] * len(names)
        )
        LIBRARY.impl(name, self._complete(self.forward), "CompositeExplicitAutograd")
        self.fake = self._complete(self.fake or self.forward)
        torch.library.register_fake(f"deepfast::{name}", self.fake, lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(
            lambda *args, out_shape=None, out_val=None, **named: self.flops(
                self.operands(*args, **named)
            )
        )
        self.node = None
        self.types = {x.name: str(x.type) for x in arguments}
        if self.grad or self.backward:
            self._add_autograd()
            _register_autocast(self)
            _register_decomposition(self)

    def _add_autograd(self) -> None:
        """Makes the bare node and registers autograd."""
        fields = self.operands._fields
        self.places = [i for i, name in enumerate(fields) if "Tensor" in self.types[name]]
        """Which operands are tensors."""
        self.listed = fields[0] if self.types[fields[0]] == "List[Tensor]" else None
        """The name of the operand that is a list."""
        self.needs: Any = namedtuple("needs", [fields[i] for i in self.places])  # type: ignore[misc]
        read = self.grad.types if self.grad else {}
        both = [
            (name, i) for i, name in enumerate((*fields, *self.results._fields)) if name in read
        ]
        # By name the place among operands and results of what is saved.
        self.saved = [(name, i) for name, i in both if "Tensor" in read[name]]
        self.options = [(name, i) for name, i in both if "Tensor" not in read[name]]
        self.grads = [
            (f"d{name}", i) for i, name in enumerate(self.results._fields) if f"d{name}" in read
        ]
        """The place of each result's gradient that ``grad`` reads."""
        self.gradient_of = [name[1:] for name in self.grad.results._fields] if self.grad else []
        self.differentiate = common.first_order(self.name)(self._gradients)
        self.node = _node(self)
        torch.library.register_autograd(
            f"deepfast::{self.name}", self._backward, setup_context=self._setup, lib=LIBRARY
        )

    def _complete(self, function: Callable) -> Callable:
        """``function`` of the operands in order, with an empty tensor for a missing result."""

        def run(*args):
            results = function(self.operands._make(args))
            if isinstance(results, Tensor):
                return results
            like = args[0][0] if isinstance(args[0], list) else args[0]
            return tuple(like.new_empty(0) if x is None else x for x in results)

        return run

    def __call__(self, *args, **named) -> tuple:
        given = self.operands(*args, **named)
        first = given[0][0] if type(given[0]) is list else given[0]
        if watched(first) and not _seen_through(first):
            if self.node is not None:
                common.reverse_mode_only(self.name)
            return _as_tuple(self.registered(*given))[: self.public]
        if not torch._C._is_any_autocast_enabled():
            return self._eager(given)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return self._eager(given)

    def _eager(self, given) -> tuple:
        """By the bare node, or by ``forward`` alone where no gradient is needed."""
        if self.node is not None and torch.is_grad_enabled():
            tensors = [given[i] for i in self.places]
            if self.listed:
                tensors = [*tensors[0], *tensors[1:]]
            for x in tensors:
                if x is not None and x.requires_grad:
                    return self.node(given, *tensors)
        return _as_tuple(self.forward(given))[: self.public]

    def save(self, ctx, given, results: tuple, bare: bool) -> None:
        """Saves what backward needs."""
        ctx.set_materialize_grads(False)
        ctx.bare, both = bare, (*given, *results)
        ctx.options = {name: both[i] for name, i in self.options}
        tensors = {name: both[i] for name, i in self.saved}
        if self.setup is not None:
            tensors |= self.setup(ctx, given, self.results._make(results))
        several = tensors.pop(self.listed, ())
        ctx.names = list(tensors)
        ctx.save_for_backward(*tensors.values(), *several)

    def _gradients(self, ctx, needs, grads: tuple) -> list:
        """The gradients of the tensors among the operands, in their order. Autograd casts them to
        the operands' dtypes.

        needs: whether each of them needs one; of a list of tensors a list.
        """
        ctx.needs = self.needs(*needs)
        named: dict[str, Any] = {}
        if grads[0] is not None or any(grad is not None for grad in grads):
            tensors, count = ctx.saved_tensors, len(ctx.names)
            kept = ctx.options | dict(zip(ctx.names, tensors[:count], strict=True))
            if self.listed:
                kept[self.listed] = list(tensors[count:])
            named = (self.backward or gradients)(self, ctx, kept, self.results(*grads))
        ordered = [
            named.get(name) if need else None
            for name, need in zip(self.needs._fields, needs, strict=True)
        ]
        if self.listed and not ordered[0]:
            ordered[0] = [None] * len(needs[0])
        return ordered

    def _setup(self, ctx, inputs, output) -> None:
        """`save`, as torch calls it after the forward pass of the registered op."""
        results = _as_tuple(output)
        if self.public is not None:
            ctx.mark_non_differentiable(*results[self.public :])
        self.save(ctx, self.operands._make(inputs), results, bare=False)

    def _backward(self, ctx, *grads) -> tuple:
        needs = [ctx.needs_input_grad[i] for i in self.places]
        of_places = dict(zip(self.places, self.differentiate(ctx, needs, grads), strict=True))
        return tuple(map(of_places.get, range(len(ctx.needs_input_grad))))


def _node(op: Op):
    """The op as a bare autograd node.

    It gets all operands as one and, for autograd, each tensor among them.
    """

    @common.traced_as(op.name)
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, *_tensors):
            results = _as_tuple(op.forward(given))
            op.save(ctx, given, results, bare=True)
            return results[: op.public]

        @staticmethod
        def backward(ctx, *grads):
            needs = ctx.needs_input_grad[1:]
            if not op.listed:
                return None, *op.differentiate(ctx, needs, grads)
            count = len(needs) - len(op.places) + 1
            first, *rest = op.differentiate(ctx, (needs[:count], *needs[count:]), grads)
            return None, *first, *rest

    return common.bare_apply(Node)


def gradients(op: Op, ctx, kept: dict, grads) -> dict:
    """The gradients of the operands of ``op`` by name, which `Op.grad` computes."""
    needs = [getattr(ctx.needs, name) for name in op.gradient_of]
    wants = [need if isinstance(need, bool) else any(need) for need in needs]
    read = {name: grads[i] for name, i in op.grads}
    return dict(zip(op.gradient_of, op.grad(**kept, **read, wants=wants), strict=True))


def _register_autocast(op: Op) -> None:
    """Also where nothing is cast: inside the op autocast must not change the products."""

    def register(device_type: str) -> None:
        key = getattr(torch._C.DispatchKey, f"Autocast{device_type}")

        def rule(*args):
            given = op.operands._make(args)
            if op.cast:
                cast = common.autocast(*(getattr(given, name) for name in op.cast))
                given = given._replace(**dict(zip(op.cast, cast, strict=True)))
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return op.registered(*given)

        # Registered twice: tracing modes look the rule up in Python, the dispatcher in its own
        # table.
        op.registered.py_impl(key)(rule)
        LIBRARY.impl(op.name, rule, key.name)

    register("CPU")
    register("CUDA")


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


def _register_decomposition(op: Op) -> None:
    """Makes ``op`` decompose into `Op.plain` in exported programs, for ONNX and other runtimes.

    By default torch decomposes only ops of a library without kernels and without autograd of their
    own. Ours have both. So a rule for torch's tracing mode decomposes them, and does so in no other
    trace: compilers keep the ops, and eager code never meets the rule.
    """

    def rule(mode, func, types, args, kwargs):
        if not _decomposing(mode):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        with mode:
            given = op.operands(*args, **kwargs)
            results = op.plain(given)
            if len(op.results._fields) == 1:
                return results
            # What only backward reads is NaN here.
            rest = op.fake(*given)[len(results) :]
            return *results, *(torch.full_like(x, torch.nan) for x in rest)

    torch.library.register_torch_dispatch(
        op.registered._schema.name, ProxyTorchDispatchMode, rule, lib=LIBRARY
    )


def register_launch(name: str, launch: Launch) -> None:
    """Registers the fake of an op that runs a launch, which returns nothing, and its FLOPs."""

    def count(*args, out_shape=None, **named) -> int:
        return launch.flops(**dict(zip(launch.names, args, strict=False)), **named)

    torch.library.register_fake(f"deepfast::{name}", lambda *_, **__: None, lib=LIBRARY)
    register_flop_formula(getattr(torch.ops.deepfast, name))(count)


if backend.compiled():
    torch.library.register_fake("deepfast::advise_states", lambda _states: None)
    for _launch in LAUNCHES.values():
        register_launch(_launch.name, _launch)
