"""The check of a kernel before its first use on a GPU, in the process that uses it.

A launch has variants: Triton compiles one for each width, dtype, missing operand and so on. Before
a variant runs for the first time, it runs once on small random operands of the same kind, and the
result is compared with the reference in float64. This compiles no other variant, and takes
milliseconds. `variant_of` tells most variants apart. Triton compiles more, such as for an address
that is no multiple of 16, so each of its compiled kernels asks before its first use. A wrong or
failing kernel is not used: the reference computes the call, later calls choose another backend, and
`store` saves the error for later processes.

A check makes no collective call and waits for no other process. So the ranks of a process group
cannot block each other: each rank checks what it launches.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deepfast.dtypes import dtype_name
from deepfast.launches import Launch, Operand
from deepfast.reference import accuracy
from deepfast.selfcheck import store
from deepfast.selfcheck.operands import alike, no_elements
from deepfast.selfcheck.store import tell_once

MODES = ("first-use", "off", "require")

Run = Callable[..., None]
"""A launch that takes its operands in order."""


class BackendError(RuntimeError):
    """No backend can run the op, or the requested one cannot."""

    __module__ = "deepfast.backend"  # Where users find it.


class _Refused(RuntimeError):
    """A kernel that Triton compiles during a launch must not run."""


class NoReference(RuntimeError):
    """The reference raises an error, so a kernel cannot be compared with it."""


def mode() -> str:
    """DEEPFAST_SELFCHECK: first-use checks a kernel before its first use, off checks none, and
    require makes a kernel that fails its check an error."""
    found = os.environ.get("DEEPFAST_SELFCHECK") or MODES[0]
    if found not in MODES:
        raise ValueError(f"DEEPFAST_SELFCHECK: expected one of {', '.join(MODES)}, got {found!r}")
    return found


def why_not_now() -> str | None:
    """Why nothing can be checked at this moment."""
    # The check waits for the GPU and allocates memory. Both would break a capture.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "in the capture of a CUDA graph"
    # A compiled graph holds the registered op. Its kernels run, and are checked, when the graph
    # runs. Here tensors have no values.
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
    if fake or torch.compiler.is_compiling() or torch._guards.TracingContext.try_get():
        return "while a compiler traces it"
    return None


CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Another process may have taken it, so no kernel is at fault."""
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Runs the check without the user's autocast and modes, and leaves both unchanged.

    Autocast, dispatch modes (such as a FLOP counter) and the default device are off. Random
    operands need no gradient and have a generator of their own. All work is on the current stream,
    in order with the user's.
    """
    with (
        torch.autocast(device.type, enabled=False),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


# ---- variants ------------------------------------------------------------------------------------


@functools.cache
def variant_of(launch: Launch) -> Callable[..., tuple]:
    """A function of the operands that tells variants apart: the device, the dtype, widths, which
    operands are missing, flags, words, and the rough length of lists.

    It is compiled once, because it runs at each launch: it takes about a microsecond.
    """
    text: dict[Operand, str] = {}
    parts: list[str] = []
    widths: set[str] = set()
    for o in launch.operands:
        if o.dtype == "storage" and o.type != "Tensor?":
            text[o] = f"{o.name}[0]" if o.type == "Tensor[]" else o.name
    first = next(iter(text.values()))
    # Widths of operands that are never missing first.
    for o in sorted(launch.operands, key=lambda o: o not in text):
        there = f"{o.name} is not None and " if o.type == "Tensor?" else ""
        for i, letter in enumerate(o.shapes[0] if o.shapes else ()):
            if letter in set("DEHGV") - widths:
                widths |= {letter} if o in text else set()
                parts.append(f"{there}{text.get(o, o.name)}.shape[{i}]")
        if len(o.shapes) > 1:
            parts.append(f"{there}{o.name}.dim()")
        if o.type == "Tensor?":
            parts.append(f"{o.name} is not None")
        elif o.type in ("int[]", "Tensor[]"):
            parts.append(f"len({o.name}).bit_length()")
        elif o.type in ("bool", "str"):
            parts.append(o.name)
        elif o.name == "dropout_p":
            parts.append("dropout_p > 0")
        elif o.type == "int" and not o.below:
            # Lengths choose tiles. A window's side without end is -1.
            parts.append(f"(-1 if {o.name} < 0 else {o.name}.bit_length())")
    values = ", ".join([f"{first}.get_device()", f"{first}.dtype", *parts])
    return eval(f"lambda {', '.join(launch.names)}: ({values})")


# ---- one check -----------------------------------------------------------------------------------


def _copies(given: list, dtype: torch.dtype | None) -> list:
    """The operands, copied; their floating-point numbers in ``dtype``."""

    def copy(x):
        if isinstance(x, list):
            return [copy(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        return x.to(dtype, copy=True) if dtype and x.is_floating_point() else x.clone()

    return [copy(x) for x in given]


def _results(launch: Launch, run: Run, given: list) -> dict[str, Tensor]:
    """What the launch writes into its operands, by name."""
    run(*given)
    found: dict[str, Tensor] = {}
    for o, x in zip(launch.operands, given, strict=True):
        if o.writes and isinstance(x, list):
            found |= {f"{o.name}[{i}]": y for i, y in enumerate(x)}
        elif o.writes and x is not None:
            found[o.name] = x
    return found


def fault(
    launch: Launch, run: Run, reference: Run, operands: tuple, device: torch.device,
    dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """The error of a launch on random operands like ``operands``; None if it is correct.

    Raises:
        NoReference: the reference raises an error.
        Exception: what the launch raises.
    """
    with _undisturbed(device):
        given = alike(launch, operands, torch.Generator(device).manual_seed(1))
        try:
            exact = _results(launch, reference, _copies(given, torch.float64))
            plain = _results(launch, reference, _copies(given, None))
        except Exception as error:
            raise NoReference(f"because the reference fails ({first_line(error)})") from error
        got = _results(launch, run, given)
        for name, value in got.items():
            # The log of a sum over no key is -inf.
            infinite = exact[name].isinf()
            if not torch.equal(value[infinite].double(), exact[name][infinite]):
                return f"{name}: expected {exact[name][infinite]}, got {value[infinite]}"
            near, far = (x[name].masked_fill(infinite, 0) for x in (plain, exact))
            found = accuracy.fault(value.masked_fill(infinite, 0), near, far, dtype)
            if found is not None:
                return f"{name}: {found}"
    return None


# ---- before each launch --------------------------------------------------------------------------

_right: dict[tuple[str, str], set[tuple]] = {}
"""(launch, backend) -> the variants that may run."""
_checking = threading.RLock()
"""Only one thread checks at a time; others wait. Autograd runs backward in its own threads."""


def forget() -> None:
    """Reads the files of results again at the next use."""
    for variants in _right.values():
        variants.clear()
    store.forget()


class Checked:
    """A launch of a backend, with a check of each variant before its first use."""

    def __init__(
        self, launch: Launch, by: str, run: Run, reference: Run, failed: Callable[[], None],
        thread: Any = None,
    ):  # fmt: skip
        """
        run: the launch; by: its backend.
        reference: the reference launch, which runs instead of a wrong kernel.
        failed: called where a check fails, so that later calls choose another backend.
        thread: `deepfast.kernels.launch.thread` for Triton, which compiles more variants than
            `variant_of` tells apart. Each is checked before it runs, too.
        """
        self.launch, self.by, self.run, self.reference = launch, by, run, reference
        self.failed, self.thread = failed, thread
        self.variant_of = variant_of(launch)
        self.right = _right.setdefault((launch.name, by), set())

    def __call__(self, *operands) -> None:
        variant = self.variant_of(*operands)
        if not (variant in self.right or self._may_run(operands, variant)):
            self.reference(*operands)
        elif self.thread is None:
            self.run(*operands)
        else:
            self._run_by_triton(operands, variant)

    def _run_by_triton(self, operands: tuple, variant: tuple) -> None:
        """Runs the launch, which asks before it runs a kernel for the first time."""
        thread = self.thread
        thread.ask = functools.partial(self._ask, operands, variant[:2])
        thread.launched = False
        try:
            self.run(*operands)
        except _Refused as refused:
            if thread.launched:
                raise BackendError(str(refused)) from None
            self.reference(*operands)
        finally:
            thread.ask = None

    def _ask(self, operands: tuple, at: tuple, kernel: str, compiled: str) -> bool:
        """Whether a compiled kernel may run; if it is new, the launch is checked once more."""
        thread, ask, launched = self.thread, self.thread.ask, self.thread.launched
        try:
            if self._may_run(operands, (*at, kernel, compiled)):
                return True
            raise _Refused(
                f"{self.launch.op}: {kernel} failed its check, or could not be checked, after "
                "another kernel of the same launch had run; run the program again"
            )
        finally:
            thread.ask, thread.launched = ask, launched

    def _may_run(self, operands: tuple, variant: tuple) -> bool:
        """Whether a new variant may run: it is in the file of results, or it passes the check."""
        if no_elements(self.launch, operands):
            return True
        index, dtype, *rest = variant
        device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
        kernels = self.launch.op, self.by, dtype_name(dtype)
        with _checking:
            known, unknown = store.of(device), None
            kept = (self.launch.name, *rest) in known.right.get(kernels, ())
            if kernels not in known.wrong and not kept:
                unknown = why_not_now() or self._check(known, operands, device, dtype, rest)
            wrong = known.wrong.get(kernels)
            if wrong is None and unknown is None:
                self.right.add(variant)
                return True
        name = " ".join(kernels)
        if mode() == "require":
            raise BackendError(
                f"DEEPFAST_SELFCHECK=require: {name}: expected a kernel that passes, got "
                f"{wrong or f'no check {unknown}'}"
            )
        if wrong is None:
            tell_once(
                f"deepfast: {name} cannot be checked {unknown}, so the reference computes this "
                "call; call the op once beforehand, in eager mode, to check its kernel"
            )
        return False

    def _check(
        self, known: store.Store, operands: tuple, device: torch.device, dtype: torch.dtype,
        variant: list,
    ) -> str | None:  # fmt: skip
        """Checks a variant and keeps the result; returns why that was not possible, or None."""
        launch, by, lost = self.launch, self.by, None
        line = {
            "op": launch.op, "backend": by, "dtype": dtype_name(dtype), "launch": launch.name,
            "variant": variant,
        }  # fmt: skip
        compiled: list[tuple[str, str]] = []
        if self.thread is not None:
            self.thread.ask = lambda *kernel: compiled.append(kernel)
        try:
            with known.check(**line):
                error = fault(launch, self.run, self.reference, operands, device, dtype)
        except NoReference as raised:
            return str(raised)
        except Exception as raised:
            if out_of_memory(raised):
                return f"without memory ({first_line(raised)})"
            error, lost = first_line(raised), _lost_context(device)
        finally:
            if self.thread is not None:
                self.thread.ask = None
        if error is not None:
            error = f"{launch.name} {tuple(variant)}: {error}"
            store.log.warning(
                "deepfast: %s by %s in %s failed its check against float64 on %s, so later "
                "calls use another backend: %s (stored in %s; run `deepfast selfcheck --op %s` to "
                "check it again)", launch.op, by, dtype_name(dtype), store.device_name(device),
                error, known.path, launch.op,
            )  # fmt: skip
        known.add(**line, error=error)
        if error is not None:
            self.failed()
        for kernel in compiled if error is None else ():
            known.add(**line | {"variant": kernel}, error=None)
        if lost is not None:
            raise BackendError(
                f"{launch.op}: the check of {by} made the GPU unusable for this process ({lost}); "
                "restart the program: it then uses another backend"
            )
        return None


def _lost_context(device: torch.device) -> str | None:
    """The CUDA error if an earlier error made the GPU unusable for this process, else None."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            return first_line(error)
    return None
