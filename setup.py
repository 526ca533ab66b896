"""Builds deepfast._C: one library of ops against PyTorch's stable ABI.

Environment: CXX names the compiler, MAX_JOBS bounds parallel compiles.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent

if importlib.util.find_spec("torch") is None:
    sys.exit(
        "deepfast is compiled against the PyTorch you use, and torch was not found: install torch "
        "first, then run `pip install --no-build-isolation .` (or `make setup`)"
    )

# One line per instruction set: a kernel file is compiled once for each, and the processor
# chooses at run time. Never -march=native: that library would crash on an older machine.
X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTION_SETS = {"portable": []}
if X86:
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    INSTRUCTION_SETS["avx512"] = [
        *INSTRUCTION_SETS["avx2"],
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    ]
    INSTRUCTION_SETS["avx512bf16"] = [*INSTRUCTION_SETS["avx512"], "-mavx512bf16"]

# -Wno-psabi: vector types never cross a library boundary. -Wno-maybe-uninitialized: GCC 12 warns
# inside its own intrinsics header.
KERNEL_FLAGS = ["-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"]
KERNEL_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]


class BuildOps(build_ext):
    """Compiles csrc/ with ninja, or reports that no compiler was found and leaves it out."""

    def build_extension(self, ext):
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
        if compiler is None:
            print(
                "deepfast: no C++ compiler was found (set CXX to name one); installing without "
                "the compiled ops, the reference backend will serve",
                file=sys.stderr,
            )
            ext.optional = True
            return
        missing = [m for m in ("pybind11", "ninja") if importlib.util.find_spec(m) is None]
        if missing:
            sys.exit(f"deepfast: compiling the ops needs `pip install {' '.join(missing)}` first")
        # A folder of its own that outlives the install: the next one compiles only what changed.
        folder = ROOT / "build" / f"{sys.implementation.cache_tag}-{platform.machine()}"
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(compiler, target))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        command = [sys.executable, "-m", "ninja", "-C", str(folder), "-j", jobs]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"deepfast: compiling the ops failed; the commands are in {folder}")

    def get_outputs(self):
        return [path for path in super().get_outputs() if Path(path).exists()]


def ninja_file(compiler: str, target: Path) -> str:
    """The build, file by file."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import include_paths

    includes = [*include_paths(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    version = torch.__version__
    common = ["-std=c++17", "-fPIC", "-fvisibility=hidden", *(["-DDEEPFAST_X86"] if X86 else [])]
    op_flags = [*common, "-O2", "-Wall", *(f"-isystem {path}" for path in includes)]
    op_flags += [
        # The oldest torch whose stable ABI is enough: one binary serves 2.10 and newer.
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-DDEEPFAST_TORCH_VERSION={version}",
        f"-DDEEPFAST_ARCHITECTURE={platform.machine()}",
        f"-DDEEPFAST_COMPILER={Path(compiler).name}",
        f"-DDEEPFAST_ISAS={'+'.join(INSTRUCTION_SETS)}",
    ]
    lines = [
        f"cxx = {compiler}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{libraries} -ltorch -ltorch_cpu -lc10",
    ]
    objects = []

    def compile_one(source: Path, name: str, flags: list[str]):
        objects.append(f"{name}.o")
        lines.append(f"build {name}.o: compile {source}")
        lines.append(f"  flags = {' '.join(flags)}")

    csrc = (ROOT / "csrc").resolve()
    for source in [csrc / "bindings.cpp", *sorted((csrc / "cpu").glob("*.cpp"))]:
        if not source.stem.endswith("_kernel"):
            compile_one(source, source.stem, op_flags)
            continue
        for isa, isa_flags in INSTRUCTION_SETS.items():
            flags = [*common, *KERNEL_FLAGS, *isa_flags, f"-DDEEPFAST_ISA={isa}"]
            compile_one(source, f"{source.stem}_{isa}", flags)
    lines.append(f"build {target}: link {' '.join(objects)}")
    lines.append(f"default {target}")
    return "\n".join(lines) + "\n"


setup(
    packages=[
        "deepfast.kernels",
        "deepfast.bench",
        "deepfast.bench.gpu",
        *find_packages(
            include=["deepfast", "deepfast.*"], exclude=["deepfast.kernels*", "deepfast.bench*"]
        ),
    ],
    package_dir={
        "deepfast.kernels": "kernels",
        "deepfast.bench": "bench",
        "deepfast.bench.gpu": "bench/gpu",
    },
    package_data={"deepfast": ["py.typed", "recipes/*.yaml", "profiling/*.html"]},
    ext_modules=[Extension("deepfast._C", sources=["csrc/bindings.cpp"])],
    cmdclass={"build_ext": BuildOps},
)
