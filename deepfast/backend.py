"""Chooses the implementation (backend) of an op, with a reason for each one that is not chosen.

``backend=None`` takes the backend in the environment variable DEEPFAST_BACKEND. Where that is not
set, it takes the first of `BACKENDS` that can run the op and is a default. On a GPU the table in
`deepfast.rule` says which kernels are defaults, and each variant of a kernel is checked before its
first use (`deepfast.selfcheck.first_use`). There is no silent fallback: `explain` gives the reason
for every backend that was not chosen, `deepfast info` prints the reasons, a failed check is a
warning, and `record` lists what was chosen.

From above to below: which backends can run an op (`refusal`), which of them are defaults
(`reserve`, `explain`), and the choice (`preview`, `choose`), which is kept.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from deepfast import library, rule
from deepfast.dtypes import DTYPES, dtype_name
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use, store
from deepfast.selfcheck.first_use import BackendError

BACKENDS = ("cuda", "triton", "varlen", "cpu", "sdpa", "reference")
"""In the order of choice. varlen and sdpa are torch's own attention; the rest are deepfast's."""

SDPA = ("sdpa", "cuda")
"""Backends that run attention by torch's SDPA. cuda has no attention kernel of its own; by SDPA a
model with this one backend has every op."""

OPS = {
    op: tuple(name for name, launch in LAUNCHES.items() if launch.op == op)
    for op in dict.fromkeys(launch.op for launch in LAUNCHES.values())
}
"""The launches of each op. norm_linear and feed_forward use those of layer_norm and activation."""

KERNEL_FILES = {op: (op,) for op in OPS} | {
    # The boundary's far passes have their own file.
    "boundary": ("boundary", "mix_rows"),
    "attention_boundary": ("attention_boundary", "attend_rows"),
    "linear_cross_entropy": ("cross_entropy",),
}
"""The files of kernels/ that serve an op."""

TRITON = tuple(
    op for op, files in KERNEL_FILES.items()
    if all((Path(__file__).parent / "kernels" / f"{file}.py").exists() for file in files)
)  # fmt: skip
"""Ops with Triton kernels."""

CUDA = ("boundary_forward", "boundary_backward")
"""The launches with kernels in csrc/cuda. With the backend cuda Triton's kernels run all others,
because a model has one ``backend`` for all its ops; attention has torch's."""

IN_CUDA = {LAUNCHES[name].op for name in CUDA}

CAPABILITY = (8, 0)
"""The lowest compute capability that the CUDA kernels are built for."""

CHECKED = {"cuda": ("cuda", "triton")}
"""By type of device the backends whose kernels are checked before their first use."""

Device = torch.device | str


_C, _C_REASON = library.load()


# OpenMP may give parallel loops fewer threads than torch reports. Only the environment is read: a
# parallel loop would start threads, and a process with threads cannot fork safely.
_limit, _threads = os.environ.get("OMP_THREAD_LIMIT", ""), torch.get_num_threads()
if _limit.isdecimal() and int(_limit) < _threads:
    warnings.warn(
        f"OMP_THREAD_LIMIT={_limit} limits parallel loops to {_limit} of {_threads} threads",
        RuntimeWarning,
        stacklevel=2,
    )


emulated = None
"""In tests, the launches of csrc/cuda compiled for a CPU; the backend cuda then uses them there."""


def emulate_cuda(launches) -> None:
    """Makes ``launches`` (a namespace of `torch.ops`, or None) the backend cuda on a CPU."""
    global emulated
    emulated = launches
    forget()


def _visible(device: torch.device) -> list[int]:
    """The GPUs that tensors on ``device`` may be on: without an index, all."""
    return [device.index] if device.index is not None else list(range(torch.cuda.device_count()))


def _cuda_refusal(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if op == "attention":
        here = device.type == "cuda" or emulated is not None
        return None if here else f"tensors are on {device.type}, not cuda"
    if op not in IN_CUDA:
        return f"{op} has no kernel in CUDA C++; with backend='cuda' Triton runs it"
    if dtype == torch.float64:
        return "CUDA kernels compute in float32"
    if device.type != "cpu" or emulated is None:
        reason = _library_refusal(device)
        if reason is not None:
            return reason
    reason = _triton_refusal(op, device.type, dtype)
    return reason and f"Triton runs its far passes: {reason}"


def _library_refusal(device: torch.device) -> str | None:
    """Why the CUDA kernels of the compiled library cannot run on ``device``."""
    if _C is None:
        return _C_REASON
    built = _C.build_info()
    if built["cuda"] is None:
        why = f"the C++ ops were compiled without CUDA: {built['no_cuda']}"
        return f"{why}; with nvcc and a torch for CUDA `{library.BUILD}` adds it"
    if device.type != "cuda":
        return f"tensors are on {device.type}, not cuda"
    for i in _visible(device):
        found = torch.cuda.get_device_capability(i)
        if found < CAPABILITY:
            has, needed = (".".join(map(str, c)) for c in (found, CAPABILITY))
            name = torch.cuda.get_device_name(i)
            return f"cuda:{i} ({name}) has compute capability {has}, kernels need {needed}"
    return None


def _too_wide(device: torch.device, dim: int) -> str | None:
    """Why the CUDA kernels cannot hold rows of ``dim`` channels."""
    most = 8192
    if device.type == "cuda":
        # The sums of wider rows need 160 KiB of shared memory; some cards have 99 KiB.
        devices = map(torch.cuda.get_device_properties, _visible(device))
        if any(p.shared_memory_per_block_optin < 160 << 10 for p in devices):  # type: ignore[attr-defined]
            most = 4096
    return None if dim <= most else f"its rows have at most {most} channels here, not {dim}"


@functools.cache
def _triton_module(name: str):
    """(kernel file, None), or (None, why it does not load)."""
    try:
        return importlib.import_module(f"deepfast.kernels.{name}"), None
    except ImportError as error:
        return None, f"deepfast.kernels.{name} does not load ({error})"


def _launch_refusal() -> str | None:
    """Why Triton cannot launch a kernel: it compiles each launcher in C, when it is first used."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return "Triton compiles C at a first launch: expected gcc, clang or the program in CC"
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names another folder; Triton does the same.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    folder = sysconfig.get_paths(scheme)["include"]
    if not os.path.exists(f"{folder}/Python.h"):
        return f"Triton compiles C at a first launch: expected Python's headers in {folder}"
    return None


def _triton_refusal(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "Triton kernels compute in float32"
    interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device_type != "cuda" and not interpreted:
        return f"tensors are on {device_type}, not cuda (TRITON_INTERPRET=1 runs kernels on a cpu)"
    if torch.version.hip and not interpreted:
        return f"the Triton kernels are for CUDA, and this torch is for ROCm {torch.version.hip}"
    reasons = (_triton_module(name)[1] for name in KERNEL_FILES[op])
    return next(filter(None, reasons), None if interpreted else _launch_refusal())


def _torch_refusal(op: str, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    if op != "attention":
        return f"{backend} is torch's attention, not {op}"
    if backend == "sdpa":
        return None
    if device_type != "cuda":
        return f"tensors are on {device_type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's varlen attention takes bfloat16 and float16, not {dtype}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen attention"
    return None


def refusal(
    op: str, backend: str, device: Device, dtype: torch.dtype, dim: int | None = None
) -> str | None:
    """Why ``backend`` cannot run ``op`` for this device, dtype and rows of ``dim`` channels; None
    where it can."""
    if op not in OPS:
        raise BackendError(f"expected an op of {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of float32, bfloat16, float16, float64"
    device = torch.device(device)
    match backend:
        case "reference":
            return None
        case "cpu":
            if device.type != "cpu":
                return f"tensors are on {device.type}, not cpu"
            return _C_REASON
        case "triton":
            return _triton_refusal(op, device.type, dtype)
        case "varlen" | "sdpa":
            return _torch_refusal(op, backend, device.type, dtype)
        case "cuda":
            reason = _cuda_refusal(op, device, dtype)
            if reason is None and dim is not None and op != "attention":
                reason = _too_wide(device, dim)
            return reason
    return f"expected one of {', '.join(BACKENDS)}"


def checkable(op: str, device: torch.device) -> dict[str, list[str]]:
    """The backends whose kernels for ``op`` can be checked on ``device``, with their dtypes."""
    names = [n for n in CHECKED.get(device.type, ()) if op != "attention" or n not in SDPA]
    found = {n: [dtype_name(d) for d in DTYPES if refusal(op, n, device, d) is None] for n in names}
    return {name: dtypes for name, dtypes in found.items() if dtypes}


def reserve(
    op: str, backend: str, device: torch.device, dtype: torch.dtype, dim: int | None = None
) -> str | None:
    """Why ``backend``, which can run the op, is not a default; None where it is one."""
    ask = f"request it with backend={backend!r}"
    if backend == "cuda" and op == "attention":
        return "it is torch's sdpa under another name"
    if backend in CHECKED.get(device.type, ()):
        gpus = _visible(device) if device.type == "cuda" else []
        reason = rule.why_not(op, backend, gpus, dtype, dim)
        if reason is None:
            error = store.error_of(op, backend, device, dtype_name(dtype))
            reason = error and f"it failed its check here ({error})"
        return reason and f"{reason}; {ask}"
    reasons = {
        "triton": "Triton's interpreter is for tests", "cuda": "the emulator is for tests",
        "varlen": "it has no dropout",
    }  # fmt: skip
    return f"{reasons[backend]}; {ask}" if backend in reasons else None


def explain(
    op: str, device: Device, dtype: torch.dtype, dim: int | None = None
) -> dict[str, str | None]:
    """For every backend the reason why it is not chosen; None where it may be chosen."""
    device = torch.device(device)
    return {
        name: refusal(op, name, device, dtype, dim) or reserve(op, name, device, dtype, dim)
        for name in BACKENDS
        if op == "attention" or name not in ("varlen", "sdpa")
    }


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


def preview(
    op: str, requested: str | None, device: Device, dtype: torch.dtype, width: int | None = None
):
    """What `choose` returns; it is neither kept nor recorded."""
    if requested == "cuda" and op not in (*IN_CUDA, "attention"):
        requested = "triton"
    device = torch.device(device)
    if requested is not None:
        reasons = {requested: refusal(op, requested, device, dtype, width)}
    else:
        reasons = explain(op, device, dtype, width)
    default = requested is None and device.type in CHECKED
    if default and first_use.mode() == "require":
        _require_right(op, device, dtype)
    for name, reason in reasons.items():
        if reason is None:
            check = default and name in CHECKED[device.type] and first_use.mode() != "off"
            return name, _launchers(op, name, check)
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    who = "no backend" if requested is None else f"backend {requested!r}"
    can = "can" if requested is None else "cannot"
    raise BackendError(f"{op}: {who} {can} serve {dtype} on {device.type} ({why})")


_choices: dict[tuple, tuple[str, SimpleNamespace | None]] = {}


def forget() -> None:
    """Makes every choice again, by the results on disk."""
    _choices.clear()
    first_use.forget()


def _require_right(op: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises where a kernel of the op has failed its check on the device."""
    for name in CHECKED[device.type]:
        if error := store.error_of(op, name, device, dtype_name(dtype)):
            raise BackendError(
                f"DEEPFAST_SELFCHECK=require: {op} {name} {dtype_name(dtype)}: expected a kernel "
                f"that is right, got {error}"
            )


def _launchers(op: str, name: str, check: bool = False) -> SimpleNamespace | None:
    """The launches of ``op``, which take their operands by name; None for torch's own attention.

    check: whether each variant is checked before its first use.
    """
    if op == "attention" and name in ("varlen", *SDPA):
        return None
    runs = _runs(op, name)
    if check:
        references, thread = _runs(op, "reference"), _triton_module("launch")[0].thread
        runs = {
            f: first_use.Checked(
                LAUNCHES[f], name, run, references[f], _choices.clear,
                None if name == "cuda" and f in CUDA else thread,
            )
            for f, run in runs.items()
        }  # fmt: skip
    return SimpleNamespace(**{f: LAUNCHES[f].by_name(run) for f, run in runs.items()})


def _runs(op: str, name: str) -> dict[str, Callable[..., None]]:
    """The launches of ``op``, which take their operands in order."""
    if name in ("cpu", "cuda"):
        # cpu and cuda are one library; the dispatcher chooses by the tensors' device.
        ops = emulated if name == "cuda" and emulated is not None else torch.ops.deepfast
        here = [f for f in OPS[op] if name == "cpu" or f in CUDA]
        # The function inside of an op of torch, which calls the dispatcher, costs less time.
        compiled = {f: getattr(ops, f).default._op for f in here}
        return compiled if name == "cpu" else _runs(op, "triton") | compiled
    if name == "reference":
        modules = [importlib.import_module(f"deepfast.reference.{op}")]
    else:
        modules = [_triton_module(file)[0] for file in KERNEL_FILES[op]]
    launchers = {f: next(getattr(m, f) for m in modules if hasattr(m, f)) for f in OPS[op]}
    return {f: LAUNCHES[f].in_order(run) for f, run in launchers.items()}


_records: list[list[tuple[str, str]]] = []


def choose(
    op: str, requested: str | None, device: Device, dtype: torch.dtype, width: int | None = None
):
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
        raise BackendError(
            f"{op}: {source}: expected one of {', '.join(BACKENDS)}, got {requested!r}"
        )
    kind = device if isinstance(device, str) else device.type
    if kind not in CHECKED and requested != "cuda":
        width = None  # Here it does not matter.
    asked_for = op, requested, device, dtype, width
    found = _choices.get(asked_for)
    if found is None:
        found = _choices[asked_for] = preview(op, requested, device, dtype, width)
    name, launchers = found
    for seen in _records:
        seen.append((op, name))
    return name, launchers


def attention_width(device: torch.device, queries: int, keys: int) -> int | None:
    """The longest sentences as `choose` takes them for attention: a range of lengths has one size,
    so that a compiler makes one version for each range and not for each length."""
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
        del _records[next(i for i, other in enumerate(_records) if other is seen)]


def compiled() -> bool:
    """Whether deepfast._C has been imported, which defines the compiled launches."""
    return _C is not None


def build_info() -> dict:
    """How the compiled library was built, or the reason why it is missing."""
    return dict(_C.build_info()) if _C is not None else {"missing": _C_REASON}
