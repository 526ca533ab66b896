"""How kernels are launched, past most of what Triton does for a launch.

`JITFunction.run` finds the compiled variant of each launch anew, with 40 to 60 us of Python, and
asks the CUDA driver about every tensor. `start` keeps the compiled kernels by what Triton
specialises on, and hands it addresses. Where a kernel is not compiled yet, where a profiler has set
hooks, and in the interpreter the launch goes Triton's way.

Before a compiled kernel runs for the first time, `start` asks `thread.ask`, if it is set.
"""

import functools
import threading
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

INTERPRETED = triton.knobs.runtime.interpret


class _Thread(threading.local):
    """The launch that a thread makes."""

    ask: Callable[[str, str], bool | None] | None = None
    """Is called with the name of a kernel and its variant before `start` runs it for the first time
    while this is set. It raises an error where the kernel must not run, and returns whether `start`
    may run it from now on without asking."""
    launched = False
    """Whether `start` has run a kernel since somebody made this False."""


thread = _Thread()


def cdiv(x: int, y: int) -> int:
    """x / y rounded up. That of Triton takes 4 us on a host, as does its next power of 2."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def launcher(launch: Callable[..., None]) -> Callable[..., None]:
    """Decorates a launcher: its kernels run on the device of its operands.

    Triton launches on the current device, whatever the device of the tensors that it is given.
    """

    @functools.wraps(launch)
    def run(a):
        x = next(x for x in a if isinstance(x, torch.Tensor))
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launch(a)
        with torch.cuda.device(x.get_device()):
            return launch(a)

    return run


# ---- the variants of a kernel --------------------------------------------------------------------


def _taking(get: Callable, keys: list) -> Callable[[Any], tuple]:
    """A function that takes these entries (`itemgetter`) or attributes of an object, as a tuple."""
    if len(keys) > 1:
        return get(*keys)
    return lambda x: tuple(get(key)(x) for key in keys)


class Kernel:
    """The parameters of a kernel by kind, and its compiled variants."""

    def __init__(self, kernel: Any):
        self.names = kernel.arg_names
        self.drops = "threshold" in self.names
        self.plans, self.variants = dict[tuple, _Plan](), dict[tuple, Any]()
        # The interpreter has no variants.
        parameters = () if INTERPRETED else kernel.params
        self.constants = _taking(itemgetter, [p.num for p in parameters if p.is_constexpr])
        rest = [p for p in parameters if not p.is_constexpr]
        self.plain = _taking(itemgetter, [p.num for p in rest if p.do_not_specialize])
        self.places = [p.num for p in rest if not p.do_not_specialize]
        self.anywhere = {p.num for p in rest if p.do_not_specialize_on_alignment}

    def variant(self, args: tuple, options: tuple) -> tuple[tuple | None, list]:
        """The key of the compiled variant that takes ``args``, and these with addresses in place of
        tensors. None for the first where an integer of 64 bits decides too.

        Triton specialises a pointer on its dtype and on an alignment to 16 bytes, an integer on 1
        and on the factor 16.
        """
        kinds, given, most = [], list(args), max(self.plain(args), default=0)
        for place in self.places:
            x = args[place]
            if x is None:
                kinds.append(None)
            elif type(x) is int:
                kinds.append(2 if x == 1 else x % 16 == 0)
                most = max(most, x)
            elif type(x) is float:
                kinds.append(float)
            elif type(x) is tuple:
                inner, given[place], largest = self._of_tuple(x)
                kinds.append(inner)
                most = max(most, largest)
            else:
                given[place] = address = x.data_ptr()
                aligned = address % 16 == 0 or place in self.anywhere
                kinds.append(x.dtype if aligned else (x.dtype,))
        variant = None if most >= 2**31 else (*kinds, *self.constants(args), *options)
        return variant, given

    @staticmethod
    def _of_tuple(xs: tuple) -> tuple[tuple, tuple, int]:
        """The same of tensors of one dtype, or integers, that are one argument; and the largest
        integer."""
        if type(xs[0]) is int:
            return tuple(2 if x == 1 else x % 16 == 0 for x in xs), xs, max(xs)
        addresses = tuple(x.data_ptr() for x in xs)
        return (xs[0].dtype, *(a % 16 == 0 for a in addresses)), addresses, 0


def known(kernel: Any) -> Kernel:
    """The facts of a Triton kernel, which are kept on it."""
    facts = getattr(kernel, "deepfast", None)
    if facts is None:
        facts = kernel.deepfast = Kernel(kernel)
    return facts


def _hooked() -> bool:
    """Whether a launch calls functions of a profiler."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def start(kernel: Any, programs: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    """``kernel[programs](*args, **options)``, with all arguments in the kernel's order. Of no
    programs nothing is compiled."""
    if 0 in programs:
        return
    variant = compiled = None
    if not INTERPRETED:
        of, driver, ask = known(kernel), triton.runtime.driver.active, thread.ask
        device = driver.get_current_device()
        variant, given = of.variant(args, tuple(options.items()))
        kept_by = variant, device, ask is None
        compiled = None if _hooked() else of.variants.get(kept_by)
    if compiled is None:
        keep = variant is not None
        if keep and ask is not None and kept_by not in of.variants:
            keep = ask(kernel.__name__, repr(variant))
        made = kernel[programs](*args, **options)
        if keep and isinstance(made, CompiledKernel):
            of.variants[kept_by] = made
        thread.launched = True
        return
    x, y, z = (*programs, 1, 1)[:3]
    handles = driver.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, *handles, None, None, None, *given)
    thread.launched = True


# ---- operands by name ----------------------------------------------------------------------------


def dropout_factors(p: float) -> tuple[int, float]:
    """The smallest draw that is kept, and the factor of a kept element."""
    threshold = int(p * 65536 + 0.5)
    return threshold, 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0


def stride(x: torch.Tensor | None, axis: int) -> int:
    """The distance along an axis; 0 for a missing operand."""
    return 0 if x is None else x.stride(axis)


class _Plan:
    """Where the arguments of a kernel come from, given the names that a launcher passes."""

    def __init__(self, names: list[str], given: tuple[str, ...]):
        missing = [name for name in names if name not in given]
        strides = [name for name in missing if name.startswith(("s_", "s1_"))]
        others = [name for name in missing if name not in strides]
        operands = [name[2:] if name.startswith("p_") else name.lower() for name in others]
        self.operands = _taking(attrgetter, operands)
        self.strided = _taking(attrgetter, [name.partition("_")[2] for name in strides])
        self.axes = [int(name.startswith("s1_")) for name in strides]
        values = [*given, *others, *strides]
        self.order = _taking(itemgetter, [values.index(name) for name in names])
        self.options = [name for name in given if name not in names]


def launch(kernel: Any, programs: tuple[int, ...], a: Any = None, **given: Any) -> None:
    """Launches a kernel with what ``given`` names, and with operands of the record ``a``.

    Of the parameters that ``given`` leaves out ``p_NAME`` is the operand NAME, ``s_NAME`` the
    distance along its first axis and ``s1_NAME`` along its second, ``threshold`` and ``scale`` are
    those of the dropout, without which ``p_seed`` is None, and another parameter is the operand of
    its name in lower case.
    """
    of = known(kernel)
    if of.drops:
        given["threshold"], given["scale"] = dropout_factors(a.dropout_p)
        if "p_seed" not in given:
            given["p_seed"] = a.seed if a.dropout_p > 0 else None
    given["enable_fp_fusion"] = True
    names = tuple(given)
    plan = of.plans.get(names)
    if plan is None:
        plan = of.plans[names] = _Plan(of.names, names)
    values = *given.values(), *plan.operands(a), *map(stride, plan.strided(a), plan.axes)
    start(kernel, programs, plan.order(values), {name: given[name] for name in plan.options})


def call(kernel: Any, programs: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Launches a kernel with arguments by position, and further ones and options by name."""
    names = known(kernel).names[len(args) :]
    args += tuple(named.pop(name) for name in names)
    start(kernel, programs, args, named | {"enable_fp_fusion": True})
