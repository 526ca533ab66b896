"""Compiles deepfast._C: one library of ops against PyTorch's stable ABI, with ninja.

CUDA kernels are built if torch has CUDA and a matching nvcc is found. Environment: CXX names the
compiler, MAX_JOBS limits parallel compiles, DEEPFAST_BUILD_CUDA=0 leaves CUDA out and =1 makes a
build without CUDA an error.
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from deepfast import library
from deepfast.files import cache_folder, replaced
from deepfast.library import CSRC

# One line per instruction set: a kernel file is compiled once for each, and the processor
# chooses at run time. Never -march=native: that library would crash on an older machine.
X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTION_SETS: dict[str, list[str]] = {"portable": []}
if X86:
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    INSTRUCTION_SETS["avx512"] = [
        *INSTRUCTION_SETS["avx2"],
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    ]
    INSTRUCTION_SETS["avx512bf16"] = [*INSTRUCTION_SETS["avx512"], "-mavx512bf16"]

# The oldest torch whose stable ABI is enough: one binary works with 2.10 and newer.
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
# Mean times of a compiler on one core of a server.
SECONDS_PER_FILE = {"c++": 4.5, "cuda": 30.0}


class BuildError(RuntimeError):
    """The library cannot be compiled; one sentence says why."""


# ---- which compilers -----------------------------------------------------------------------------


def compiler() -> str:
    """The C++ compiler: CXX, a program or a command such as `ccache g++`; else g++ or clang++."""
    wish = os.environ.get("CXX", "")
    try:
        words = shlex.split(wish)
    except ValueError:  # A quote is open.
        words = [wish]
    if words and shutil.which(words[0]) is None:
        raise BuildError(f"CXX: expected a program, got {wish!r}")
    command = shlex.join(words) or shutil.which("g++") or shutil.which("clang++")
    if command is None:
        raise BuildError("found no C++ compiler: install g++ or clang++, or set CXX to one")
    return command


def find_nvcc() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME

    at_home = None if CUDA_HOME is None else shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    return at_home or shutil.which("nvcc")


def cuda_libraries(nvcc: str) -> list[Path]:
    """The toolkit's library folders. nvcc prints them, because it may be a wrapper elsewhere."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    top = next(line for line in said.stderr.splitlines() if line.startswith("#$ TOP="))
    root = Path(top.removeprefix("#$ TOP=")).resolve()
    return [root / name for name in ("lib64", "lib") if (root / name).is_dir()]


def nvcc_facts(nvcc: str) -> tuple[str, list[str]]:
    """The nvcc's version, such as 13.0, and the CUDA_ARCHITECTURES that it supports."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = version.split("release ")[1].split(",")[0]
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = listed.stdout.split()
    return version, [a for a in CUDA_ARCHITECTURES if f"compute_{a}" in known]


def why_not_this_nvcc(nvcc: str, torch_cuda: str) -> str | None:
    """Why this nvcc cannot build for this torch, or None if it can."""
    try:
        version, architectures = nvcc_facts(nvcc)
        runtime = [f for f in cuda_libraries(nvcc) if (f / "libcudart_static.a").exists()]
    except (OSError, subprocess.CalledProcessError, IndexError, StopIteration) as error:
        return f"{nvcc} does not behave like nvcc ({type(error).__name__}: {error})"
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        # The runtime that nvcc links in may need a newer driver than torch does.
        return f"nvcc has CUDA {version}, but torch was built with CUDA {torch_cuda}"
    if not architectures:
        return f"{nvcc} knows none of the architectures {', '.join(CUDA_ARCHITECTURES)}"
    if not runtime:
        return f"the CUDA toolkit of {nvcc} has no libcudart_static.a"
    return None


def why_no_cuda() -> str | None:
    """Why the CUDA kernels are left out, or None if they are built."""
    import torch

    wish, nvcc = os.environ.get("DEEPFAST_BUILD_CUDA", ""), find_nvcc()
    if wish not in ("", "0", "1"):
        raise BuildError(f"DEEPFAST_BUILD_CUDA: expected 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return "DEEPFAST_BUILD_CUDA=0"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} has no CUDA"
    elif nvcc is None:
        reason = "no nvcc was found"
    else:
        reason = why_not_this_nvcc(nvcc, torch.version.cuda)
    if reason is not None and wish == "1":
        raise BuildError(f"DEEPFAST_BUILD_CUDA=1, but {reason}")
    return reason


def write_headers(folder: Path) -> None:
    """Writes the C++ code generated from the table of launches."""
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
    flags = [*COMMON_FLAGS, "-O2", "-Wall", *(f"-isystem{path}" for path in includes)]
    named = {
        "TORCH_VERSION": torch.__version__,
        "ARCHITECTURE": platform.machine(),
        "COMPILER": Path(shlex.split(cxx)[-1]).name,
        "ISAS": "+".join(INSTRUCTION_SETS),
    }
    return [*flags, TARGET_VERSION, *(f"-DDEEPFAST_{name}={x}" for name, x in named.items())]


class Ninja:
    """The lines of a ninja file, and the objects that they build."""

    def __init__(self):
        self.lines: list[str] = []
        self.objects: list[str] = []

    def rule(self, name: str, command: str):
        self.lines += [f"rule {name}", f"  command = {command}", "  description = $out"]
        self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def compile(self, rule: str, source: Path, name: str, flags: list[str]):
        self.objects.append(f"{name}.o")
        escaped = str(source).replace(" ", "$ ")
        self.lines += [f"build {name}.o: {rule} {escaped}", f"  flags = {shlex.join(flags)}"]

    def text(self, link: str, target: str | Path) -> str:
        """The file, which links all objects to the target."""
        rule = ["rule link", f"  command = {link}", "  description = $out"]
        lines = [*self.lines, *rule, f"build {target}: link {' '.join(self.objects)}"]
        return "\n".join([*lines, f"default {target}", ""])


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


def ninja_file(cxx: str, target: str, folder: Path) -> str:
    """The text of build.ninja."""
    import torch

    ninja = Ninja()
    ninja.rule("compile", f"{cxx} -MMD -MF $out.d $flags -c $in -o $out")
    flags, libraries = op_flags(cxx), ["-ltorch", "-ltorch_cpu", "-lc10"]
    if reason := why_no_cuda():
        flags.append(f'-DDEEPFAST_NO_CUDA="{reason}"')
    else:
        nvcc = find_nvcc()
        cuda, link = cuda_objects(ninja, cxx, nvcc, *nvcc_facts(nvcc))
        flags, libraries = flags + cuda, libraries + link
    checks = [folder / "launches.cpp", CSRC / "common" / "arguments.cpp"]
    for source in [CSRC / "bindings.cpp", *checks, *sorted((CSRC / "cpu").glob("*.cpp"))]:
        if not source.stem.endswith("_kernel"):
            ninja.compile("compile", source, source.stem, flags)
            continue
        for isa, isa_flags in INSTRUCTION_SETS.items():
            kernel_flags = [*KERNEL_FLAGS, *isa_flags, f"-DDEEPFAST_ISA={isa}"]
            ninja.compile("compile", source, f"{source.stem}_{isa}", kernel_flags)
    libraries.insert(0, f"-L{Path(torch.__file__).parent / 'lib'}")
    return ninja.text(f"{cxx} -shared $in -o $out {shlex.join(libraries)}", target)


def parallel_jobs() -> int:
    """How many compilers run at once: MAX_JOBS, else one for each core if memory allows."""
    wish = os.environ.get("MAX_JOBS")
    if wish:
        if not wish.isdecimal() or int(wish) == 0:
            raise BuildError(f"MAX_JOBS: expected a positive integer, got {wish!r}")
        return int(wish)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(gib / GIB_PER_JOB)))


# ---- where and when ------------------------------------------------------------------------------


def choose_target() -> Path:
    """Where the library is written: into the package, or where that is read-only into the cache."""
    writable = os.access(library.PACKAGE, os.W_OK)
    return (library.in_package if writable else library.in_cache)(why_no_cuda() is None)


def work_folder() -> Path:
    """The folder of the objects. It stays, so that the next build compiles only what changed."""
    clone = (CSRC.parent / "setup.py").exists() and os.access(CSRC.parent, os.W_OK)
    folder = (CSRC.parent if clone else cache_folder()) / "build"
    return folder / f"{sys.implementation.cache_tag}-{platform.machine()}"


def _ninja(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts ninja, which prints a line such as ``3/86 layer_norm_kernel_avx2.o`` for each file."""
    command = [sys.executable, "-m", "ninja", "-C", str(folder), *options]
    streams: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    status = os.environ | {"NINJA_STATUS": "%f/%t "}
    return subprocess.Popen(command, env=status, **streams, text=True, errors="replace")


def first_error(log: str) -> str:
    """The line of a log of ninja that says what is wrong."""
    lines = [line for line in log.splitlines() if not line.startswith("ninja: build stopped")]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "no output")


def compile_ops(
    target: Path,
    begin: Callable[[int, float], object] = lambda files, seconds: None,
    advance: Callable[[int], object] = lambda done: None,
) -> None:
    """Compiles what changed and writes the library. If several processes call it, one
    compiles and the others wait.

    target: the library; others of this Python beside it are removed.
    begin: is called with the number of files to compile and the seconds that this takes.
    advance: is called with the number of files that are done.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    # torch depends on filelock, so it is installed.
    from filelock import FileLock

    cxx, folder, jobs = compiler(), work_folder(), parallel_jobs()
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        write_headers(folder)
        log = folder / "build.log"
        (folder / "build.ninja").write_text(ninja_file(cxx, "_C.so", folder))
        todo = re.findall(r"^\d+/\d+ (.*)$", _ninja(folder, "-n").communicate()[0], re.MULTILINE)
        cuda = sum(name.endswith("_cuda.o") for name in todo)
        seconds = SECONDS_PER_FILE["c++"] * (len(todo) - cuda) + SECONDS_PER_FILE["cuda"] * cuda
        begin(len(todo), seconds / min(jobs, os.cpu_count() or 1))
        with open(log, "w", buffering=1) as file, _ninja(folder, f"-j{jobs}") as ninja:
            for line in ninja.stdout:
                file.write(line)
                if done := re.match(r"(\d+)/\d+ ", line):
                    advance(int(done[1]))
        if ninja.returncode != 0:
            raise BuildError(
                f"the build failed: {first_error(log.read_text())}; the log is {log}; deepfast "
                "works without its C++ ops and then uses PyTorch's ops"
            )
        with replaced(target) as file:
            file.write((folder / "_C.so").read_bytes())
    for old in set(target.parent.glob(f"_C*{library.SUFFIX}")) - {target}:
        old.unlink()
