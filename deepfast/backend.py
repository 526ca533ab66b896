"""Chooses the implementation (backend) of an op, with a reason for each one that is not chosen.

``backend=None`` takes the backend in the environment variable DEEPFAST_BACKEND. Where that is not
set, it takes the first of `BACKENDS` that can run the op (`deepfast.availability`) and is a
default. On a GPU the table in `deepfast.rule` says which kernels are defaults, and each variant of
a kernel is checked before its first use (`deepfast.selfcheck.first_use`). There is no silent
fallback, except that "cuda" means Triton for an op without CUDA C++. `explain` gives the reason for
every backend that was not chosen, `deepfast info` prints the reasons, a failed check is a warning,
and `record` lists what was chosen.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch

from deepfast import availability, rule
from deepfast.availability import (
    BACKENDS,
    CUDA,
    IN_CUDA,
    KERNEL_FILES,
    OPS,
    BackendError,
    Device,
    why_unable,
)
from deepfast.dtypes import DTYPES, dtype_name
from deepfast.launches import LAUNCHES, Launcher
from deepfast.selfcheck import first_use, store

SDPA = ("sdpa", "cuda")
"""Backends that run attention by torch's SDPA. cuda has no attention kernel of its own; by SDPA a
model with this one backend has every op."""

CHECKED = {"cuda": ("cuda", "triton")}
"""By type of device the backends whose kernels are checked before their first use."""

# OpenMP may give parallel loops fewer threads than torch reports. Only the environment is read: a
# parallel loop would start threads, and a process with threads cannot fork safely.
_limit, _threads = os.environ.get("OMP_THREAD_LIMIT", ""), torch.get_num_threads()
if _limit.isdecimal() and int(_limit) < _threads:
    warnings.warn(
        f"OMP_THREAD_LIMIT={_limit} limits parallel loops to {_limit} of {_threads} threads",
        RuntimeWarning,
        stacklevel=2,
    )


def compiled() -> bool:
    """Whether deepfast._C has been imported, which defines the compiled launches."""
    return availability.C_OPS is not None


def build_info() -> dict:
    """How the compiled library was built, or the reason why it is missing."""
    library = availability.C_OPS
    return {"missing": availability.WHY_NO_C_OPS} if library is None else dict(library.build_info())


# ---- reasons -------------------------------------------------------------------------------------


def why_not_default(
    op: str, backend: str, device: torch.device, dtype: torch.dtype, dim: int | None = None
) -> str | None:
    """Why ``backend``, which can run the op, is not a default; None where it is one."""
    reason = None
    if backend == "cuda" and op == "attention":
        return "it is torch's sdpa under another name"
    if backend in CHECKED.get(device.type, ()):
        gpus = availability.gpus(device) if device.type == "cuda" else []
        reason = rule.why_not(op, backend, gpus, dtype, dim)
        if reason is None and (error := store.error_of(op, backend, device, dtype_name(dtype))):
            reason = f"it failed its check here ({error})"
    elif backend in ("cuda", "triton"):
        reason = "Triton's interpreter is for tests"
    elif backend == "varlen":
        reason = "it has no dropout"
    return reason and f"{reason}; request it with backend={backend!r}"


def explain(
    op: str, device: Device, dtype: torch.dtype, dim: int | None = None
) -> dict[str, str | None]:
    """For every backend the reason why it is not chosen; None where it may be chosen."""
    device = torch.device(device)
    return {
        name: why_unable(op, name, device, dtype, dim)
        or why_not_default(op, name, device, dtype, dim)
        for name in BACKENDS
        if op == "attention" or name not in ("varlen", "sdpa")
    }


def checkable(ops: Iterable[str], device: torch.device) -> list[store.Kernels]:
    """The kernels of ``ops`` that can be checked on ``device``."""
    return [
        (op, by, dtype_name(dtype))
        for op in ops
        for by in CHECKED.get(device.type, ())
        if op != "attention" or by not in SDPA
        for dtype in DTYPES
        if why_unable(op, by, device, dtype) is None
    ]


# ---- launches ------------------------------------------------------------------------------------


def launchers(op: str, backend: str) -> dict[str, Launcher]:
    """The launches of ``op`` by ``backend``, unchecked."""
    if backend == "cpu":
        return {name: compiled_launch(getattr(torch.ops.deepfast, name)) for name in OPS[op]}
    if backend == "cuda":
        # cpu and cuda are one library; the dispatcher chooses by the tensors' device.
        compiled = {name: run for name, run in launchers(op, "cpu").items() if name in CUDA}
        return launchers(op, "triton") | compiled
    if backend == "reference":
        modules = [importlib.import_module(f"deepfast.reference.{op}")]
    else:
        modules = [availability.kernel_file(file)[0] for file in KERNEL_FILES[op]]
    return {name: next(getattr(m, name) for m in modules if hasattr(m, name)) for name in OPS[op]}


def compiled_launch(packet) -> Launcher:
    # The inner function of torch's op calls the dispatcher without a Python wrapper.
    op = packet.default._op

    def run(operands: tuple) -> None:
        op(*operands)

    run.op = op  # type: ignore[attr-defined]
    return run


def _launches(op: str, backend: str, check: bool) -> SimpleNamespace | None:
    """The launches of ``op``, which take their operands by name; None for torch's own attention.

    check: whether each variant is checked before its first use.
    """
    if op == "attention" and backend in ("varlen", *SDPA):
        return None
    runs = launchers(op, backend)
    if check:
        references = launchers(op, "reference")
        thread = availability.kernel_file("launch")[0].thread
        for name, run in runs.items():
            asks = None if backend == "cuda" and name in CUDA else thread
            runs[name] = first_use.Checked(
                LAUNCHES[name], backend, run, references[name], _choices.clear, asks
            )
    return SimpleNamespace(**{name: LAUNCHES[name].by_name(run) for name, run in runs.items()})


# ---- the choice ----------------------------------------------------------------------------------

_VARIABLE = os.environ.encodekey("DEEPFAST_BACKEND")


def requested_backend(requested: str | None = None) -> str | None:
    """The argument, else the environment variable DEEPFAST_BACKEND, else None."""
    if requested is not None:
        return requested
    # Every call of an op looks here. Where a variable is missing, `get` raises and catches an
    # error, which takes longer than all else in `choose`: first look into the dictionary inside.
    if _VARIABLE not in getattr(os.environ, "_data", (_VARIABLE,)):
        return None
    return os.environ.get("DEEPFAST_BACKEND") or None


Choice = tuple[str, SimpleNamespace | None]

_choices: dict[tuple, Choice] = {}
_records: list[list[tuple[str, str]]] = []


def forget() -> None:
    """Makes every choice again, by the results on disk."""
    _choices.clear()
    first_use.forget()


def _first_that_serves(
    op: str, requested: str | None, device: torch.device, dtype: torch.dtype, width: int | None
) -> Choice:
    if requested == "cuda" and op not in (*IN_CUDA, "attention"):
        requested = "triton"
    if requested is not None:
        reasons = {requested: why_unable(op, requested, device, dtype, width)}
    else:
        reasons = explain(op, device, dtype, width)
    checked = CHECKED.get(device.type, ()) if requested is None else ()
    mode = first_use.mode() if checked else "off"
    for name in checked if mode == "require" else ():
        if error := store.error_of(op, name, device, dtype_name(dtype)):
            raise first_use.required_error((op, name, dtype_name(dtype)), error)
    for name, reason in reasons.items():
        if reason is None:
            return name, _launches(op, name, check=name in checked and mode != "off")
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    who = "no backend can" if requested is None else f"backend {requested!r} cannot"
    raise BackendError(f"{op}: {who} serve {dtype} on {device.type} ({why})")


def choose(
    op: str, requested: str | None, device: Device, dtype: torch.dtype, width: int | None = None
) -> Choice:
    """The name of the backend that runs the op, and its launch functions.

    device: of the tensors. A bare "cuda" stands for any GPU of the machine.
    width: channels of a row; of attention `attention_width`. It decides whether rows are too wide
        for a GPU backend, and what the rule chooses.

    Raises:
        BackendError: with the reason, where the requested backend (or every one) cannot run the op.
    """
    argument, requested = requested, requested_backend(requested)
    if requested is not None and requested not in BACKENDS:
        source = "DEEPFAST_BACKEND" if argument is None else "backend"
        expected = ", ".join(BACKENDS)
        raise BackendError(f"{op}: {source}: expected one of {expected}, got {requested!r}")
    kind = device.split(":")[0] if isinstance(device, str) else device.type
    if kind not in CHECKED and requested != "cuda":
        width = None  # Here it does not matter.
    asked_for = op, requested, device, dtype, width
    choice = _choices.get(asked_for)
    if choice is None:
        choice = _first_that_serves(op, requested, torch.device(device), dtype, width)
        _choices[asked_for] = choice
    for seen in _records:
        seen.append((op, choice[0]))
    return choice


def attention_width(device: torch.device, queries: int, keys: int) -> int | None:
    """The size of a call of attention for `choose`. It is the same for a range of sentence lengths,
    so a compiler makes one version for each range."""
    return rule.length_class(queries, keys) if device.type in CHECKED else None


def chosen(
    op: str, requested: str | None, device: Device, dtype: torch.dtype, width: int | None = None
) -> str:
    """Only the name. For a compiler it is a constant."""
    return choose(op, requested, device, dtype, width)[0]


# What torch.compiler.assume_constant_result does, without importing all of torch's compiler.
chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Collects (op, backend) of every choice inside the block."""
    seen: list[tuple[str, str]] = []
    _records.append(seen)
    try:
        yield seen
    finally:
        # By identity, because two different lists with the same entries are equal.
        _records[:] = [other for other in _records if other is not seen]
