"""Builds deepfast._C: one library of ops against PyTorch's stable ABI.

CUDA kernels are built where torch has CUDA and nvcc is found. Environment: CXX names the compiler,
MAX_JOBS bounds parallel compiles, DEEPFAST_BUILD_CUDA=0 leaves CUDA out and =1 demands it.
"""

import importlib.util
import os
import platform
import shlex
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

# The oldest torch whose stable ABI is enough: one binary serves 2.10 and newer.
TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020a000000000000"

# -Wno-psabi: vector types never cross a library boundary. -Wno-maybe-uninitialized: GCC 12 warns
# inside its own intrinsics header.
KERNEL_FLAGS = ["-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"]
KERNEL_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]


# Every capability from the first on: machine code for these, PTX of the last for newer ones.
CUDA_ARCHITECTURES = ("80", "90", "100")
# What one nvcc takes at its highest, with room to spare.
GIB_PER_JOB = 2


def find_nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    at_home = None if CUDA_HOME is None else shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    return at_home or shutil.which("nvcc")


def cuda_libraries(nvcc: str) -> list[Path]:
    """Folders of the toolkit's libraries; nvcc itself may be a wrapper elsewhere."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    top = next(line for line in said.stderr.splitlines() if line.startswith("#$ TOP="))
    root = Path(top.removeprefix("#$ TOP=")).resolve()
    return [root / name for name in ("lib64", "lib") if (root / name).is_dir()]


def nvcc_facts(nvcc: str) -> tuple[str, list[str]]:
    """Its version, such as 13.0, and the architectures it has of those wanted."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = version.split("release ")[1].split(",")[0]
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = listed.stdout.split()
    return version, [a for a in CUDA_ARCHITECTURES if f"compute_{a}" in known]


def nvcc_refusal(nvcc: str, torch_cuda: str) -> str | None:
    """Why this nvcc cannot build for this torch, or None where it can."""
    try:
        version, architectures = nvcc_facts(nvcc)
        runtime = [f for f in cuda_libraries(nvcc) if (f / "libcudart_static.a").exists()]
    except (OSError, subprocess.CalledProcessError, IndexError, StopIteration) as error:
        return f"{nvcc} does not answer as an nvcc does ({type(error).__name__}: {error})"
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        # The runtime that nvcc links in may ask for a newer driver than torch does.
        return f"nvcc is of CUDA {version}, torch of CUDA {torch_cuda}"
    if not architectures:
        return f"{nvcc} knows none of the architectures {', '.join(CUDA_ARCHITECTURES)}"
    if not runtime:
        return f"{nvcc} has no libcudart_static.a beside it"
    return None


def cuda_refusal() -> str | None:
    """Why the CUDA kernels are left out, or None where they are built."""
    import torch

    wish = os.environ.get("DEEPFAST_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"deepfast: DEEPFAST_BUILD_CUDA: expected 0, 1 or nothing, got {wish!r}")
    if wish == "0":
        return "DEEPFAST_BUILD_CUDA=0"
    nvcc = find_nvcc()
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} has no CUDA"
    elif nvcc is None:
        reason = "no nvcc was found"
    else:
        reason = nvcc_refusal(nvcc, torch.version.cuda)
    if reason is None:
        return None
    if wish == "1":
        sys.exit(f"deepfast: DEEPFAST_BUILD_CUDA=1, but {reason}")
    return reason


def parallel_jobs() -> int:
    """Compiles at once: as many as cores, and as memory allows."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(gib / GIB_PER_JOB)))


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
        jobs = os.environ.get("MAX_JOBS") or str(parallel_jobs())
        command = [sys.executable, "-m", "ninja", "-C", str(folder), "-j", jobs]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"deepfast: compiling the ops failed; the commands are in {folder}")

    def get_outputs(self):
        return [path for path in super().get_outputs() if Path(path).exists()]


def cuda_flags(architectures: list[str]) -> list[str]:
    """How a .cu file is compiled."""
    from torch.utils.cpp_extension import include_paths

    flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", TARGET_VERSION]
    flags += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    return flags + [f"-isystem={path}" for path in include_paths()]


def ninja_file(compiler: str, target: Path) -> str:
    """The build, file by file."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import include_paths

    # pybind11's own headers before torch's copy, which until 2.13 refuses the stable ABI.
    includes = [pybind11.get_include(), *include_paths(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    version = torch.__version__
    common = ["-std=c++17", "-fPIC", "-fvisibility=hidden", *(["-DDEEPFAST_X86"] if X86 else [])]
    op_flags = [*common, "-O2", "-Wall", *(f"-isystem {path}" for path in includes)]
    op_flags += [
        TARGET_VERSION,
        f"-DDEEPFAST_TORCH_VERSION={version}",
        f"-DDEEPFAST_ARCHITECTURE={platform.machine()}",
        f"-DDEEPFAST_COMPILER={Path(compiler).name}",
        f"-DDEEPFAST_ISAS={'+'.join(INSTRUCTION_SETS)}",
    ]
    refusal = cuda_refusal()
    nvcc = None if refusal else find_nvcc()
    libs = ["-ltorch", "-ltorch_cpu", "-lc10"]
    if nvcc is None:
        print(f"deepfast: the CUDA kernels are left out: {refusal}", file=sys.stderr)
        op_flags.append(shlex.quote(f'-DDEEPFAST_NO_CUDA="{refusal}"'))
    else:
        cuda_version, architectures = nvcc_facts(nvcc)
        op_flags.append(f"-DDEEPFAST_CUDA={'+'.join(architectures)}")
        op_flags.append(f"-DDEEPFAST_NVCC={cuda_version}")
        # Static, so that the library loads where no driver and no CUDA are.
        folders = [f"-L{folder}" for folder in cuda_libraries(nvcc)]
        libs += ["-Wl,--no-as-needed", "-ltorch_cuda", *folders, "-lcudart_static"]
        libs += ["-ldl", "-lrt", "-lpthread"]
    lines = [
        f"cxx = {compiler}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx -shared $in -o $out -L{libraries} {' '.join(libs)}",
    ]
    objects = []
    csrc = (ROOT / "csrc").resolve()
    if nvcc is not None:
        lines += [
            "rule cuda",
            f"  command = {nvcc} -MMD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        newest = f"compute_{architectures[-1]}"
        flags = [*cuda_flags(architectures), f"-gencode=arch={newest},code={newest}"]
        flags += ["-cudart=static", f"-ccbin={compiler}", "--threads=4"]
        for source in sorted((csrc / "cuda").glob("*.cu")):
            objects.append(f"{source.stem}_cuda.o")
            lines.append(f"build {objects[-1]}: cuda {source}")
            lines.append(f"  flags = {' '.join(flags)}")

    def compile_one(source: Path, name: str, flags: list[str]):
        objects.append(f"{name}.o")
        lines.append(f"build {name}.o: compile {source}")
        lines.append(f"  flags = {' '.join(flags)}")

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


if __name__ == "__main__":
    setup(
        packages=[
            "deepfast.kernels",
            *find_packages(include=["deepfast", "deepfast.*"], exclude=["deepfast.kernels*"]),
        ],
        package_dir={"deepfast.kernels": "kernels"},
        package_data={"deepfast": ["py.typed", "mt/recipes/*.yaml", "measure/*.html"]},
        ext_modules=[Extension("deepfast._C", sources=["csrc/bindings.cpp"])],
        cmdclass={"build_ext": BuildOps},
    )
