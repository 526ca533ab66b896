"""Whether nvcc compiles every CUDA kernel without register spills; needs no GPU.

Each csrc/cuda/*.cu is compiled for every architecture with warnings as errors.

    python tests/cuda/ptxas.py                                      # or make cuda-check
    python tests/cuda/ptxas.py --write bench/results/ptxas.md
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from deepfast import build

ROOT = Path(__file__).parents[2]
COLUMNS = ("kernel", "sm", "registers", "stack", "spills")

HEADER = """\
# What nvcc produces for the CUDA kernels

nvcc {version}, no GPU; `python tests/cuda/ptxas.py --write bench/results/ptxas.md`. *registers* per
thread, bytes of *stack* frame, *spills* in bytes stored and loaded.

"""


def short(name: str) -> str | None:
    """``boundary_fwd_kernel<bf16,1,2>`` from a demangled name; None if it is no kernel."""
    # A demangled name has a result type only if the kernel is a template.
    found = re.search(r"(\w+_kernel)(<.*>)?\(", re.sub(r"deepfast::", "", name))
    if found is None:
        return None
    arguments = re.sub(r"\((?:int|bool|long)\)", "", found[2] or "").replace(" ", "")
    return found[1] + re.sub(r"\btrue\b", "1", re.sub(r"\bfalse\b", "0", arguments))


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.splitlines()


REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<sm>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def compile_one(source: Path, architectures: list[str]) -> tuple[str, list[dict]]:
    """What went wrong, and the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        command = [build.find_nvcc(), *build.cuda_flags(architectures), "-Xptxas=-v"]
        command += ["-Werror=all-warnings", "-c", str(source), "-o", "out"]
        build.write_headers(Path(folder))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        return f"{source.name} does not compile:\n{said}", []
    return "", read_report(said)


def read_report(said: str) -> list[dict]:
    """The kernels in a report of ptxas."""
    found = [m.groupdict() for m in REPORT.finditer(said)]
    names = demangled([f["name"] for f in found])
    return [
        {
            "kernel": short(name),
            "sm": int(f["sm"]),
            "registers": int(f["registers"]),
            "stack": int(f["stack"]),
            "spills": int(f["stores"]) + int(f["loads"]),
        }
        for f, name in zip(found, names, strict=True)
    ]


def report(architectures: list[str]) -> tuple[list[dict], list[str]]:
    """The kernels for these architectures, and a line for each fault."""
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, source, architectures) for source in sources]
        results = [job.result() for job in jobs]
    kernels = [k for _, found in results for k in found]
    kernels.sort(key=lambda k: (k["kernel"], k["sm"]))
    return kernels, [said for said, _ in results if said] + [
        f"{k['kernel']} on sm_{k['sm']}: {k['stack']} bytes of stack, {k['spills']} of spills"
        for k in kernels if k["stack"] or k["spills"]
    ]  # fmt: skip


def table(version: str, kernels: list[dict]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([str(k[c]) for c in COLUMNS] for k in kernels)]
    return HEADER.format(version=version) + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    if build.find_nvcc() is None:
        print("cuda-check: no nvcc was found, nothing was compiled")
        return 0
    version, architectures = build.nvcc_facts(build.find_nvcc())
    kernels, faults = report(architectures)
    text = table(version, kernels)
    print(text)
    if args.write:
        args.write.write_text(text)
    print("\n".join(faults) or "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
