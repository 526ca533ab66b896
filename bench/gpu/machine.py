"""The machine of `make gpu`: its facts, the compiled ops for its GPU, the emulator in a dry run."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch

from deepfast import backend, build, library
from deepfast.machine import environment
from deepfast.selfcheck import store

ROOT = Path(__file__).resolve().parents[2]


def link_kernels(root: Path) -> None:
    """Makes the link deepfast/kernels, which a copy without symbolic links lacks."""
    link = root / "deepfast" / "kernels"
    if (link / "__init__.py").exists():
        return
    # Some copies hold a small file that names the link's target.
    if link.is_file():
        link.unlink()
    link.symlink_to(Path("..", "kernels"), target_is_directory=True)


def architecture() -> str:
    """Of the GPU, such as 90."""
    return "".join(map(str, torch.cuda.get_device_capability()))


def stale() -> bool:
    """Whether deepfast._C is missing or has no kernels for this GPU."""
    info = backend.build_info()
    if "missing" in info:
        return True
    return bool(torch.version.cuda) and architecture() not in (info["cuda"] or "").split("+")


def checked() -> bool:
    """Whether there was a full selfcheck of the kernels of every op on the GPU."""
    if stale():
        return False
    gpu = torch.device("cuda", torch.cuda.current_device())
    return set(backend.checkable(backend.OPS, gpu)) <= set(store.of(gpu).full)


def compile_ops(architectures: list[str]) -> None:
    """Compiles deepfast._C in place, with CUDA kernels for these architectures alone."""
    build.CUDA_ARCHITECTURES = tuple(architectures)
    build.compile_ops(library.in_package(build.why_no_cuda() is None))


def emulate_cuda() -> None:
    """Makes the CUDA kernels of tests/cuda's emulator the backend cuda on a CPU."""
    emulator = importlib.import_module("tests.cuda.build")
    torch.ops.load_library(emulator.build())
    emulator.emulate()


def slug(device: str) -> str:
    """A file's name for a device."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def first_line(*command: str, last: bool = False) -> str | None:
    """The first or last line of a tool's output; None if there is no such tool."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if done.returncode == 0 and lines else None


def tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def end_with_parent() -> None:
    """Makes Linux end this process when the thread that started it ends, also by a signal."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def clocks() -> str | None:
    """The clocks, temperature and power of the GPU, which nothing here changes."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
    return first_line("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def facts(dry: bool) -> dict:
    """What a reader needs to judge the numbers: the device, the machine, versions."""
    version = importlib.metadata.version if importlib.util.find_spec("triton") else lambda _: None
    found = {"device": "dry run" if dry else torch.cuda.get_device_name()}
    found |= {k: v for k, v in environment().items() if not isinstance(v, dict)}
    found |= {
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "nvcc": first_line(tool("nvcc") or "nvcc", "--version", last=True),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    if not dry:
        p = torch.cuda.get_device_properties(0)
        found |= {
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
            "l2_mib": round(p.L2_cache_size / 2**20, 1),
        }
    return found


def child_environment() -> dict[str, str]:
    """The environment of the processes that this command starts."""
    changed = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "DEEPFAST_SELFCHECK": "off"}
    # A variable of the shell must not change what is measured.
    ours = ("DEEPFAST_BACKEND", "TRITON_INTERPRET", "DEEPFAST_SELFCHECK")
    return {k: v for k, v in os.environ.items() if k not in ours} | changed


if __name__ == "__main__":
    compile_ops(sys.argv[1:])
