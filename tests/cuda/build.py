"""Compiles csrc/cuda for the processor, over the emulator beside this file.

Loading it (`torch.ops.load_library`) registers `torch.ops.deepfast_emulated`.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths

from deepfast import availability, backend
from deepfast.build import CSRC, TARGET_VERSION, BuildError, Ninja, compiler, write_headers
from deepfast.launches import LAUNCHES
from tests.kernels.agreement import numbers, run
from tests.kernels.calls import ROWS, covering, given_by

__all__ = ["BuildError", "build", "compiler", "emulate", "every_launch"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "emulated"
# -Wno-unknown-pragmas: #pragma unroll is nvcc's.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# A header of torch's has such warnings, and some functions in our unnamed namespaces are unused.
FLAGS += ["-Wno-unused-function", "-DDEEPFAST_EMULATE", TARGET_VERSION]


# Every access to memory is checked, but to stacks: fibers have stacks of their own.
BOUNDS = ["-fsanitize=address", "--param", "asan-stack=0"]


def build(bounds: bool = False) -> Path:
    """The library, compiled if it is older than its sources.

    bounds: with checks of every access, for a process that loads `sanitizer` first.
    """
    folder = FOLDER.with_name("emulated_bounds") if bounds else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libemulated.so"
    flags = [*FLAGS, f"-I{Path(__file__).parent}", "-I.", f"-I{ROOT}", f"-I{CSRC}"]
    flags += BOUNDS if bounds else []
    flags += [f"-isystem{path}" for path in include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    ninja = Ninja()
    ninja.rule("compile", f"{compiler()} -MMD -MF $out.d $flags -x c++ -c $in -o $out")
    checks = [folder / "launches.cpp", CSRC / "common" / "arguments.cpp"]
    kernels = sorted((CSRC / "cuda").glob("*.cu"))
    for source in [Path(__file__).parent / "emulated.cpp", *checks, *kernels]:
        ninja.compile("compile", source, source.stem, flags)
    shared = " ".join([compiler() or "c++", "-shared", *(BOUNDS if bounds else [])])
    link = f"{shared} $in -o $out -L{libraries} -ltorch -ltorch_cpu -lc10"
    # Of several test processes one compiles, and the others wait.
    with FileLock(folder / "lock"):
        write_headers(folder)
        (folder / "build.ninja").write_text(ninja.text(link, target))
        done = subprocess.run(
            [sys.executable, "-m", "ninja", "-C", str(folder)], capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(f"csrc/cuda does not compile over the emulator:\n{done.stdout}")
    return target


def emulate(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Makes the kernels of the loaded library the backend cuda of tensors on a CPU.

    replace: sets an attribute of a module.
    """
    cuda, launchers, library = availability._cuda, backend.launchers, torch.ops.deepfast_emulated

    def with_cuda(op, by):
        names = [name for name in backend.OPS[op] if by == "cuda" and name in backend.CUDA]
        emulated = {name: backend.compiled_launch(getattr(library, name)) for name in names}
        return launchers(op, by) | emulated

    replace(availability, "_cuda", lambda op, *at: None if op == "attention" else cuda(op, *at))
    replace(availability, "_library_with_cuda", lambda device: None)
    replace(backend, "launchers", with_cuda)
    backend.forget()


def sanitizer() -> str | None:
    """What a process with `build(bounds=True)` preloads, for LD_PRELOAD; None where it is missing.
    libasan looks for libstdc++ when it is loaded, and Python has none."""
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler() or "c++", f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found += [path] if Path(path).is_absolute() else []
    return " ".join(found) if len(found) == 2 else None


def every_launch(ops, tokens: int, dim: int) -> None:
    """All launches that have CUDA kernels, by ``ops``, a namespace of `torch.ops`: in every dtype,
    with each pair of their options."""
    sizes = {"T": (tokens,), "D": (dim,), "R": (ROWS,), "S": (ROWS + 1,)}
    for name in backend.CUDA:
        for v in covering(LAUNCHES[name], 2, sizes):
            given = numbers(name, rank=v.get("rank", 0), **given_by(LAUNCHES[name], v))
            run(ops, name, given, v["dtype"], v["dtype"])
