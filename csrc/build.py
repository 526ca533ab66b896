"""Compiles deepfast._C: one library of ops against PyTorch's stable ABI, with ninja.

setup.py decides when; this file decides the compiler, the flags and the devices. CUDA kernels are
built if torch has CUDA and a matching nvcc is found.
"""

import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CSRC = Path(__file__).resolve().parent

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

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", *(["-DDEEPFAST_X86"] if X86 else [])]
# launches.h is in the folder of the build.
COMMON_FLAGS += ["-I.", f"-I{CSRC.parent}"]
# -Wno-psabi: vector types never cross a library boundary. -Wno-maybe-uninitialized: GCC 12 warns
# inside its own intrinsics header.
KERNEL_FLAGS = [*COMMON_FLAGS, "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"]
KERNEL_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]

# Machine code for each of these, and PTX of the last one for newer devices.
CUDA_ARCHITECTURES = ("80", "90", "100")
# The most memory that one nvcc needs, rounded up.
GIB_PER_JOB = 2


# ---- which compilers -----------------------------------------------------------------------------


def compiler() -> str | None:
    """The C++ compiler: CXX, a program or a command such as `ccache g++`; else g++ or clang++."""
    words = shlex.split(os.environ.get("CXX", ""))
    if words and shutil.which(words[0]):
        return shlex.join(words)
    return shutil.which("g++") or shutil.which("clang++")


def find_nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    at_home = None if CUDA_HOME is None else shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    return at_home or shutil.which("nvcc")


def cuda_libraries(nvcc: str) -> list[Path]:
    """The folders of the toolkit's libraries, which nvcc names: nvcc may be a wrapper elsewhere."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    top = next(line for line in said.stderr.splitlines() if line.startswith("#$ TOP="))
    root = Path(top.removeprefix("#$ TOP=")).resolve()
    return [root / name for name in ("lib64", "lib") if (root / name).is_dir()]


def nvcc_facts(nvcc: str) -> tuple[str, list[str]]:
    """The nvcc's version, such as 13.0, and those of CUDA_ARCHITECTURES that it can compile for."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = version.split("release ")[1].split(",")[0]
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = listed.stdout.split()
    return version, [a for a in CUDA_ARCHITECTURES if f"compute_{a}" in known]


def nvcc_refusal(nvcc: str, torch_cuda: str) -> str | None:
    """Why this nvcc cannot build for this torch, or None if it can."""
    try:
        version, architectures = nvcc_facts(nvcc)
        runtime = [f for f in cuda_libraries(nvcc) if (f / "libcudart_static.a").exists()]
    except (OSError, subprocess.CalledProcessError, IndexError, StopIteration) as error:
        return f"{nvcc} does not answer as an nvcc does ({type(error).__name__}: {error})"
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        # The runtime that nvcc links in may need a newer driver than torch does.
        return f"nvcc is of CUDA {version}, torch of CUDA {torch_cuda}"
    if not architectures:
        return f"{nvcc} knows none of the architectures {', '.join(CUDA_ARCHITECTURES)}"
    if not runtime:
        return f"{nvcc} has no libcudart_static.a beside it"
    return None


def cuda_refusal() -> str | None:
    """Why the CUDA kernels are left out, or None if they are built."""
    import torch

    wish = os.environ.get("DEEPFAST_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"deepfast: DEEPFAST_BUILD_CUDA: expected 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return "DEEPFAST_BUILD_CUDA=0"
    nvcc = find_nvcc()
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} has no CUDA"
    elif nvcc is None:
        reason = "no nvcc was found"
    else:
        reason = nvcc_refusal(nvcc, torch.version.cuda)
    if reason is not None and wish == "1":
        sys.exit(f"deepfast: DEEPFAST_BUILD_CUDA=1, but {reason}")
    return reason


def write_headers(folder: Path):
    """Writes what is generated from the table of launches; deepfast may not be importable yet."""
    runpy.run_path(str(CSRC / "headers.py"))["write"](folder)


# ---- the build, file by file ---------------------------------------------------------------------


def cuda_flags(architectures: list[str]) -> list[str]:
    """The flags of a .cu file, which is compiled in the folder of `write_headers`."""
    from torch.utils.cpp_extension import include_paths

    flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", TARGET_VERSION]
    flags += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    return [*flags, "-I.", f"-I{CSRC.parent}", *(f"-isystem={path}" for path in include_paths())]


def op_flags(cxx: str) -> list[str]:
    """The flags of a .cpp file that includes torch."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import include_paths

    # pybind11's own headers before torch's copy, which refuses the stable ABI before torch 2.13.
    includes = [pybind11.get_include(), *include_paths(), sysconfig.get_paths()["include"]]
    return [
        *COMMON_FLAGS, "-O2", "-Wall", *(f"-isystem {path}" for path in includes),
        TARGET_VERSION,
        f"-DDEEPFAST_TORCH_VERSION={torch.__version__}",
        f"-DDEEPFAST_ARCHITECTURE={platform.machine()}",
        f"-DDEEPFAST_COMPILER={Path(shlex.split(cxx)[-1]).name}",
        f"-DDEEPFAST_ISAS={'+'.join(INSTRUCTION_SETS)}",
    ]  # fmt: skip


class Ninja:
    """The lines of a ninja file, and the objects that they build."""

    def __init__(self):
        self.lines, self.objects = [], []

    def rule(self, name: str, command: str, depends: bool = True):
        self.lines += [f"rule {name}", f"  command = {command}"]
        if depends:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def compile(self, rule: str, source: Path, name: str, flags: list[str]):
        self.objects.append(f"{name}.o")
        self.lines += [f"build {name}.o: {rule} {source}", f"  flags = {' '.join(flags)}"]


def cuda_objects(ninja: Ninja, cxx: str, nvcc: str, version: str, architectures: list[str]):
    """Adds the .cu files; returns the flags that the .cpp files and the link then need."""
    ninja.rule("cuda", f"{nvcc} -MMD -MF $out.d $flags -c $in -o $out")
    newest = f"compute_{architectures[-1]}"
    flags = [*cuda_flags(architectures), f"-gencode=arch={newest},code={newest}"]
    flags += ["-cudart=static", f"-ccbin={shlex.split(cxx)[-1]}", "--threads=4"]
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        ninja.compile("cuda", source, f"{source.stem}_cuda", flags)
    # Static, so that the library loads on machines without a driver or CUDA.
    folders = [f"-L{folder}" for folder in cuda_libraries(nvcc)]
    link = ["-Wl,--no-as-needed", "-ltorch_cuda", *folders, "-lcudart_static"]
    link += ["-ldl", "-lrt", "-lpthread"]
    return [f"-DDEEPFAST_CUDA={'+'.join(architectures)}", f"-DDEEPFAST_NVCC={version}"], link


def ninja_file(cxx: str, target: Path, folder: Path) -> str:
    """The build, file by file."""
    import torch

    ninja = Ninja()
    ninja.rule("compile", f"{cxx} -MMD -MF $out.d $flags -c $in -o $out")
    flags, libraries = op_flags(cxx), ["-ltorch", "-ltorch_cpu", "-lc10"]
    refusal = cuda_refusal()
    if refusal is None:
        nvcc = find_nvcc()
        cuda, link = cuda_objects(ninja, cxx, nvcc, *nvcc_facts(nvcc))
        flags, libraries = flags + cuda, libraries + link
    else:
        print(f"deepfast: the CUDA kernels are left out: {refusal}", file=sys.stderr)
        flags.append(shlex.quote(f'-DDEEPFAST_NO_CUDA="{refusal}"'))
    checks = [folder / "launches.cpp", CSRC / "common" / "arguments.cpp"]
    for source in [CSRC / "bindings.cpp", *checks, *sorted((CSRC / "cpu").glob("*.cpp"))]:
        if not source.stem.endswith("_kernel"):
            ninja.compile("compile", source, source.stem, flags)
            continue
        for isa, isa_flags in INSTRUCTION_SETS.items():
            kernel_flags = [*KERNEL_FLAGS, *isa_flags, f"-DDEEPFAST_ISA={isa}"]
            ninja.compile("compile", source, f"{source.stem}_{isa}", kernel_flags)
    torch_folder = Path(torch.__file__).parent / "lib"
    ninja.rule(
        "link", f"{cxx} -shared $in -o $out -L{torch_folder} {' '.join(libraries)}", depends=False
    )
    ninja.lines += [f"build {target}: link {' '.join(ninja.objects)}", f"default {target}"]
    return "\n".join(ninja.lines) + "\n"


def parallel_jobs() -> int:
    """How many compilers run at once: as many as there are cores, if memory allows."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(gib / GIB_PER_JOB)))


def compile_ops(target: Path):
    """Compiles and links what changed; exits with a message if that fails."""
    missing = [m for m in ("pybind11", "ninja") if importlib.util.find_spec(m) is None]
    if missing:
        sys.exit(f"deepfast: compiling the ops needs `pip install {' '.join(missing)}` first")
    # This folder stays after the install, so that the next one compiles only what changed.
    folder = CSRC.parent / "build" / f"{sys.implementation.cache_tag}-{platform.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_headers(folder)
    (folder / "build.ninja").write_text(ninja_file(compiler(), target, folder))
    jobs = os.environ.get("MAX_JOBS") or str(parallel_jobs())
    command = [sys.executable, "-m", "ninja", "-C", str(folder), "-j", jobs]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"deepfast: compiling the ops failed; the commands are in {folder}")
