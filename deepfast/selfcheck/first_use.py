"""The check of a kernel before its first use on a GPU, in the process that uses it.

A launch has variants: Triton compiles one for each width, dtype, missing operand and so on. Before
a variant runs for the first time, it runs once on small random operands of the same kind, and the
result is compared with the reference in float64. This compiles no other variant, and takes
milliseconds. `operands.variant_of` tells most variants apart. Triton compiles more, such as for an
address that is no multiple of 16, so each of its compiled kernels asks before its first use. A
wrong or failing kernel is not used: the reference computes the call, later calls choose another
backend, and `store` saves the error for later processes.

A check makes no collective call and waits for no other process. So the ranks of a process group
cannot block each other: each rank checks what it launches.
"""

import functools
import os
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from deepfast.availability import BackendError
from deepfast.dtypes import dtype_name
from deepfast.launches import Launch, Launcher
from deepfast.reference import accuracy
from deepfast.reference.attention import attention
from deepfast.selfcheck import operands, store

MODES = ("first-use", "off", "require")


class _Refused(RuntimeError):
    """A kernel that Triton compiles during a launch must not run."""


class NoReference(RuntimeError):
    """The reference raises an error, so a kernel cannot be compared with it."""


def mode() -> str:
    """DEEPFAST_SELFCHECK: first-use checks a kernel before its first use, off checks none, and
    require makes a kernel that fails its check an error."""
    wish = os.environ.get("DEEPFAST_SELFCHECK") or MODES[0]
    if wish not in MODES:
        raise ValueError(f"DEEPFAST_SELFCHECK: expected one of {', '.join(MODES)}, got {wish!r}")
    return wish


def required_error(kernels: store.Kernels, got: str) -> BackendError:
    """The error of the mode require."""
    return BackendError(
        f"DEEPFAST_SELFCHECK=require: {' '.join(kernels)}: expected a kernel that passes, got {got}"
    )


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


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Another process may have taken it, so no kernel is at fault."""
    if isinstance(error, torch.AcceleratorError):
        # cudaErrorMemoryAllocation
        return getattr(error, "error_code", None) == 2
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _lost_context(device: torch.device) -> str | None:
    """The CUDA error if an earlier error made the GPU unusable for this process, else None."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return first_line(error)
    return None


# ---- one check -----------------------------------------------------------------------------------


def fault(
    launch: Launch, run: Launcher, reference: Launcher, call: Any, device: Any, dtype: torch.dtype
) -> str | None:
    """The error of a launch on random operands like the record ``call``, which are on ``device``
    with the storage dtype ``dtype``; None if it is correct.

    The user's autocast, modes (such as a FLOP counter) and default device are off in it. Random
    operands need no gradient and have a generator of their own. All work is on the current stream,
    in order with the user's.

    Raises:
        NoReference: the reference raises an error.
        Exception: what the launch raises.
    """
    with (
        torch.autocast(device.type, enabled=False),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        given = operands.like_those_of(launch, call, torch.Generator(device).manual_seed(1))
        try:
            if launch.name == "attention_backward":
                # Its kernels for short sentences take it that o is the result of the others.
                for x, result in zip((given.o, given.lse), attention(given), strict=True):
                    x.copy_(result)
            plain, exact = operands.copied(given), operands.copied(given, torch.float64)
            reference(exact)
            reference(plain)
        except Exception as error:
            raise NoReference(f"because the reference fails ({first_line(error)})") from error
        run(given)
        got, near, far = (operands.written(launch, x) for x in (given, plain, exact))
        return accuracy.first_fault(got, near, far, dtype)


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
        self, launch: Launch, by: str, run: Launcher, reference: Launcher, failed: Any, thread: Any
    ):
        """
        run: the launch; by: its backend.
        reference: the reference launch, which runs instead of a wrong kernel.
        failed: called where a check fails, so that later calls choose another backend.
        thread: `deepfast.kernels.launch.thread` for Triton, which compiles more variants than
            `variant_of` tells apart. Each is checked before it runs, too.
        """
        self.launch, self.by, self.run, self.reference = launch, by, run, reference
        self.failed, self.thread = failed, thread
        self.variant_of = operands.variant_of(launch)
        self.right = _right.setdefault((launch.name, by), set())

    def __call__(self, call: Any) -> None:
        variant = self.variant_of(call)
        if not (variant in self.right or self._may_run(call, variant)):
            self.reference(call)
        elif self.thread is None:
            self.run(call)
        else:
            self._run_by_triton(call, variant)

    def _run_by_triton(self, call: Any, variant: tuple) -> None:
        """Runs the launch, which asks before it runs a kernel for the first time."""
        thread = self.thread
        thread.ask = functools.partial(self._ask, call, variant[:2])
        thread.launched = False
        try:
            self.run(call)
        except _Refused as refused:
            if thread.launched:
                raise BackendError(str(refused)) from None
            self.reference(call)
        finally:
            thread.ask = None

    def _ask(self, call: Any, at: tuple, kernel: str, compiled: str) -> bool:
        """Whether a compiled kernel may run; if it is new, the launch is checked once more."""
        thread, ask, launched = self.thread, self.thread.ask, self.thread.launched
        try:
            if self._may_run(call, (*at, kernel, compiled)):
                return True
            raise _Refused(
                f"{self.launch.op}: {kernel} failed its check, or could not be checked, after "
                "another kernel of the same launch had run; run the program again"
            )
        finally:
            thread.ask, thread.launched = ask, launched

    def _may_run(self, call: Any, variant: tuple) -> bool:
        """Whether a new variant may run: it has nothing to compute, it is in the file of results,
        or it passes the check."""
        if 0 in operands.sizes_of(self.launch, call).values():
            return True
        index, dtype, *rest = variant
        device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
        kernels = self.launch.op, self.by, dtype_name(dtype)
        with _checking:
            results, unknown = store.of(device), None
            kept = (self.launch.name, *rest) in results.right.get(kernels, ())
            if kernels not in results.wrong and not kept:
                unknown = why_not_now() or self._check(call, variant, device)
            wrong = results.wrong.get(kernels)
            if wrong is None and unknown is None:
                self.right.add(variant)
                return True
        if mode() == "require":
            raise required_error(kernels, wrong or f"no check {unknown}")
        if wrong is None:
            store.tell_once(
                f"deepfast: {' '.join(kernels)} cannot be checked {unknown}, so the reference "
                "computes this call; call the op once beforehand, in eager mode, to check its "
                "kernel"
            )
        return False

    def _check(self, call: Any, variant: tuple, device: torch.device) -> str | None:
        """Checks a variant and keeps the result; returns why that was not possible, or None."""
        (op, name), (_, dtype, *rest) = (self.launch.op, self.launch.name), variant
        results, lost = store.of(device), None
        line = {"op": op, "backend": self.by, "dtype": dtype_name(dtype), "launch": name}
        compiled: list[tuple[str, str]] = []
        if self.thread is not None:
            self.thread.ask = lambda *kernel: compiled.append(kernel)
        try:
            with results.check(**line, variant=rest):
                error = fault(self.launch, self.run, self.reference, call, device, dtype)
        except NoReference as raised:
            return str(raised)
        except Exception as raised:
            if out_of_memory(raised):
                return f"without memory ({first_line(raised)})"
            error, lost = first_line(raised), _lost_context(device)
        finally:
            if self.thread is not None:
                self.thread.ask = None
        if error is None:
            for kernel in (rest, *compiled):
                results.add(**line, variant=kernel, error=None)
            return None
        error = f"{name} {tuple(rest)}: {error}"
        results.add(**line, variant=rest, error=error)
        self.failed()
        store.log.warning(
            f"deepfast: {op} by {self.by} in {dtype_name(dtype)} failed its check against float64 "
            f"on {store.device_name(device)}, so later calls use another backend: {error} (stored "
            f"in {results.path}; run `deepfast selfcheck --op {op}` to check it again)"
        )
        if lost is not None:
            raise BackendError(
                f"{op}: the check of {self.by} made the GPU unusable for this process ({lost}); "
                "restart the program: it then uses another backend"
            )
        return None
