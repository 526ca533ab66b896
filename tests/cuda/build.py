"""Compiles csrc/cuda for the processor, over the emulator beside this file.

    python tests/cuda/build.py      prints the path of the library, compiled if sources changed

Loading it (`torch.ops.load_library`) registers `torch.ops.deepfast_emulated`.
"""

import fcntl
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "emulated"
# -Wno-unknown-pragmas: #pragma unroll is nvcc's.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# A header of torch's has such warnings, and some functions in our unnamed namespaces are unused.
FLAGS += ["-Wno-unused-function", "-DDEEPFAST_EMULATE", "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def build() -> Path:
    """The library, compiled if it is older than its sources."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / "libemulated.so"
    flags = [*FLAGS, f"-I{Path(__file__).parent}", "-I.", f"-I{ROOT}", f"-I{ROOT / 'csrc'}"]
    flags += [f"-isystem {path}" for path in include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    lines = [
        "rule compile",
        f"  command = {compiler()} -MMD -MF $out.d {' '.join(flags)} -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler()} -shared $in -o $out -L{libraries} -ltorch -ltorch_cpu -lc10",
    ]
    objects = []
    kernels = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    checks = [FOLDER / "launches.cpp", ROOT / "csrc" / "common" / "arguments.cpp"]
    for source in [Path(__file__).parent / "emulated.cpp", *checks, *kernels]:
        objects.append(f"{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
    lines.append(f"build {target}: link {' '.join(objects)}")
    # Of several test processes one compiles, and the others wait.
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runpy.run_path(str(ROOT / "csrc" / "headers.py"))["write"](FOLDER)
        (FOLDER / "build.ninja").write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "ninja", "-C", str(FOLDER)], capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(f"csrc/cuda does not compile over the emulator:\n{done.stdout}")
    return target


if __name__ == "__main__":
    print(build())
