"""Which backends can run an op on this machine, and why each other one cannot."""

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable
from types import ModuleType

import torch

from deepfast import library
from deepfast.dtypes import DTYPES, dtype_name
from deepfast.launches import LAUNCHES

BACKENDS = ("cuda", "triton", "varlen", "cpu", "sdpa", "reference")
"""In the order of choice. varlen and sdpa are torch's own attention; the rest are deepfast's."""

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

CUDA = ("boundary_forward", "boundary_backward")
"""The launches with kernels in csrc/cuda. With the backend cuda Triton's kernels run all others,
because a model has one ``backend`` for all its ops; attention has torch's."""

IN_CUDA = {LAUNCHES[name].op for name in CUDA}

CAPABILITY = (8, 0)
"""The lowest compute capability that the CUDA kernels are built for."""

Device = torch.device | str

C_OPS, WHY_NO_C_OPS = library.load()


class BackendError(RuntimeError):
    """No backend can run the op, or the requested one cannot."""


def gpus(device: torch.device) -> list[int]:
    """The GPUs that tensors on ``device`` may be on: without an index, all."""
    return [device.index] if device.index is not None else list(range(torch.cuda.device_count()))


@functools.cache
def kernel_file(name: str) -> tuple[ModuleType | None, str | None]:
    """(file of kernels/, None), or (None, why it does not load)."""
    try:
        return importlib.import_module(f"deepfast.kernels.{name}"), None
    except ImportError as error:
        return None, f"deepfast.kernels.{name} does not load ({error})"


def why_unable(
    op: str, backend: str, device: Device, dtype: torch.dtype, dim: int | None = None
) -> str | None:
    """Why ``backend`` cannot run ``op`` for this device, dtype and rows of ``dim`` channels; None
    where it can."""
    if op not in OPS:
        raise BackendError(f"expected an op of {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of {', '.join(map(dtype_name, DTYPES))}"
    device = torch.device(device)
    match backend:
        case "reference":
            return None
        case "cpu":
            return _not_on("cpu", device) or WHY_NO_C_OPS
        case "triton":
            return _triton(op, device, dtype)
        case "varlen" | "sdpa":
            return _torch(op, backend, device, dtype)
        case "cuda":
            return _cuda(op, device, dtype, dim)
    return f"expected one of {', '.join(BACKENDS)}"


def _not_on(kind: str, device: torch.device) -> str | None:
    return None if device.type == kind else f"tensors are on {device.type}, not {kind}"


def _torch(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if op != "attention":
        return f"{backend} is torch's attention, not {op}"
    if backend == "sdpa":
        return None
    if reason := _not_on("cuda", device):
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's varlen attention takes bfloat16 and float16, not {dtype}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen attention"
    return None


def _triton(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "Triton kernels compute in float32"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted:
        if reason := _not_on("cuda", device):
            return f"{reason} (TRITON_INTERPRET=1 runs kernels on a cpu)"
        if torch.version.hip:
            rocm = torch.version.hip
            return f"the Triton kernels are for CUDA, and this torch is for ROCm {rocm}"
    reasons = (kernel_file(name)[1] for name in KERNEL_FILES[op])
    return next(filter(None, reasons), None if interpreted else _no_c_compiler())


def _no_c_compiler() -> str | None:
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


def _cuda(op: str, device: torch.device, dtype: torch.dtype, dim: int | None) -> str | None:
    if op == "attention":
        return _not_on("cuda", device)
    if op not in IN_CUDA:
        return f"{op} has no kernel in CUDA C++; with backend='cuda' Triton runs it"
    if dtype == torch.float64:
        return "CUDA kernels compute in float32"
    if reason := _library_with_cuda(device):
        return reason
    if reason := _triton(op, device, dtype):
        return f"Triton runs its far passes: {reason}"
    if dim is None:
        return None
    # The sums of wider rows need more shared memory.
    most = 4096 if device.type == "cuda" and small_blocks(gpus(device)) else 8192
    return None if dim <= most else f"its rows have at most {most} channels here, not {dim}"


def small_blocks(devices: Iterable[int]) -> bool:
    """Whether a thread block of one of the GPUs has less than 160 KiB of shared memory; some cards
    have 99 KiB."""
    found = map(torch.cuda.get_device_properties, devices)
    return any(p.shared_memory_per_block_optin < 160 << 10 for p in found)  # type: ignore[attr-defined]


def _library_with_cuda(device: torch.device) -> str | None:
    """Why the CUDA kernels of the compiled library cannot run on ``device``."""
    if C_OPS is None:
        return WHY_NO_C_OPS
    built = C_OPS.build_info()
    if built["cuda"] is None:
        why = f"the C++ ops were compiled without CUDA: {built['no_cuda']}"
        return f"{why}; with nvcc and a torch for CUDA `{library.BUILD}` adds it"
    if reason := _not_on("cuda", device):
        return reason
    for i in gpus(device):
        capability = torch.cuda.get_device_capability(i)
        if capability < CAPABILITY:
            has, needed = (".".join(map(str, c)) for c in (capability, CAPABILITY))
            name = torch.cuda.get_device_name(i)
            return f"cuda:{i} ({name}) has compute capability {has}, kernels need {needed}"
    return None
