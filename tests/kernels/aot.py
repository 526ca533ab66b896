"""What Triton's compiler produces for every kernel, without a GPU.

Each case of `aot_cases.py` calls a launcher; every kernel that it launches is compiled for a
target instead of run, and its machine code is read: registers, shared memory, spills, the width of
each access to global memory.

    python tests/kernels/aot.py --only layer_norm --target 90
    python tests/kernels/aot.py --write bench/results/aot.md

Where deepfast is not installed, PYTHONPATH=. goes before them.
"""

import argparse
import ast
import concurrent.futures
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# Read when triton is imported. The interpreter compiles nothing.
os.environ["TRITON_INTERPRET"] = "0"

import aot_sass as sass
import triton
from aot_cases import CASES, LAYERS, T
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from deepfast.kernels.launch import Kernel

COMMITTED = Path(__file__).parents[2] / "bench" / "results" / "aot.md"

HEADER = f"""\
# What the compiler produces for the Triton kernels

Triton {triton.__version__}, no GPU; `python tests/kernels/aot.py --write bench/results/aot.md`.
If the sources or Triton are not those of this table, a test compiles every kernel and compares it
with these numbers. Otherwise it compiles one case of each launcher, whose numbers must be the same.

Sources {{sources}}.

T = {T} tokens, {LAYERS} layers, attention over 8 heads of 64. *registers* per thread, *shared*
bytes and *warps* per program, *resident* the warps that a multiprocessor holds at once, of 64.
*loads* and *stores* of global memory in the machine code as count x bits, *async* the loads that go
straight to shared memory, *tensor core* the matrix instructions, *spills* the accesses to local
memory. A kernel of several cases has its row at the first of them.

"""


# ---- what compiled kernels are kept by -----------------------------------------------------------


class Keys:
    """`deepfast.kernels.launch` keeps compiled kernels by its own keys. Where Triton would compile
    two kernels, these must differ; else they must not, because each costs a check."""

    def __init__(self):
        self.theirs: dict[tuple, set[str]] = {}
        self.keys: dict[tuple, set] = {}
        variant, self.ours = Kernel.variant, None

        def remember(*given):
            found = variant(*given)
            self.ours = found[0]
            return found

        Kernel.variant = remember

    def add(self, kernel, key) -> None:
        """Called where Triton would compile ``kernel``, with its own key."""
        self.theirs.setdefault((kernel.__name__, self.ours), set()).add(str(key))
        self.keys.setdefault((kernel.__name__, str(key)), set()).add(self.ours)

    def faults(self) -> list[str]:
        return [f"{name} {ours}: {len(theirs)} kernels of Triton"
                for (name, ours), theirs in self.theirs.items() if len(theirs) > 1] + [
            f"{name} {theirs}: {len(ours)} keys"
            for (name, theirs), ours in self.keys.items() if len(ours) > 1]  # fmt: skip


# ---- one case ----------------------------------------------------------------------------------


def use_target(target: int) -> None:
    """Makes Triton and the launchers behave as if there were a GPU.

    Triton 3.6 to 3.9 call these three functions of the driver before a kernel runs.
    """
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target, 32),
        # Compiled kernels are kept by device.
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)


def compile_case(index: int, target: int) -> dict[str, dict]:
    """Every kernel that a case launches, by its hash, compiled and measured.

    Needs its own process, because it changes Triton and the launchers.
    """
    case, chip, kernels = CASES[index], sass.CHIPS[target], {}
    use_target(target)
    module = importlib.import_module(f"deepfast.kernels.{case.module}")
    common = importlib.import_module("deepfast.kernels.common")
    common.multiprocessors = module.multiprocessors = lambda device: chip.multiprocessors
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = time.perf_counter() - start
        if kernel.hash not in kernels:
            variant = 1 + sum(k["kernel"].split()[0] == self.__name__ for k in kernels.values())
            name = self.__name__ if variant == 1 else f"{self.__name__} {variant}"
            found = {"case": case.name, "kernel": name, "sm": target, "seconds": seconds}
            kernels[kernel.hash] = found | measure(kernel, chip)

    JITFunction.run = compile_only
    try:
        case.call(getattr(module, case.call.__name__), **case.sizes)
    finally:
        JITFunction.run = run
    return kernels


def measure(kernel, chip: sass.Chip) -> dict:
    """Numbers of a compiled kernel (`triton.compiler.CompiledKernel`)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", text)[1])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    resident = sass.resident_warps(chip, registers, shared, warps)
    found = {"registers": registers, "shared": shared, "warps": warps, "resident": resident}
    return found | sass.read_sass(text)


# ---- all of them -------------------------------------------------------------------------------


def compile_all(jobs: list[tuple[int, int]], processes: int) -> tuple[list[dict], list[str]]:
    """The kernels of all (case, target) pairs, and a line for every launcher that failed."""
    kernels, failed = {}, []
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache
        for (index, target), found in [(job, pool.submit(compile_case, *job)) for job in jobs]:
            try:
                for digest, kernel in found.result().items():
                    kernels.setdefault(digest, kernel)
            except Exception as error:
                print(error.__cause__ or error, file=sys.stderr)
                said = (str(error).strip().splitlines() or [""])[-1]
                where = f"{CASES[index].name} on sm_{target}"
                failed.append(f"{where}: launcher failed: {type(error).__name__}: {said}")
    return list(kernels.values()), failed


def sources() -> str:
    """A digest of everything that decides what is compiled; comments and docstrings do not."""
    here, found = Path(__file__).parent, hashlib.sha256()
    for file in sorted([*(here.parents[1] / "kernels").glob("*.py"), here / "aot_cases.py"]):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
        found.update(ast.dump(tree).encode())
    return found.hexdigest()[:16]


def settled() -> bool:
    """Whether the committed table is of these sources and this Triton."""
    text = COMMITTED.read_text() if COMMITTED.exists() else ""
    return f"Sources {sources()}." in text and f"Triton {triton.__version__}," in text


def differences(kernels: list[dict]) -> list[str]:
    """A line for each kernel whose row in the committed table is another one."""
    committed = sass.read_table(COMMITTED.read_text())
    found = {sass.key(k): dict(zip(sass.COLUMNS, sass.row(k), strict=True)) for k in kernels}
    return [
        f"{COMMITTED.name} has {committed.get(key)}, compiled: {row}"
        for key, row in found.items() if row != committed.get(key)
    ]  # fmt: skip


def compare(kernels: list[dict]) -> list[str]:
    """The faults of all kernels, given the committed table."""
    text = COMMITTED.read_text() if COMMITTED.exists() else ""
    # Another compiler allocates registers differently.
    committed = sass.read_table(text) if f"Triton {triton.__version__}," in text else {}
    return [
        line
        for k in kernels
        for line in sass.faults(k, committed.get(sass.key(k)), triton.__version__)
    ]


def show(kernels: list[dict]) -> None:
    """The table as text for the terminal, with the compile time in seconds."""
    lines = [[*sass.COLUMNS, "seconds"]]
    lines += [[*sass.row(k), f"{k['seconds']:.1f}"] for k in kernels]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose file or name holds this text")
    parser.add_argument("--target", type=int, choices=sass.CHIPS, action="append")
    parser.add_argument(
        "--changed", action="store_true",
        help="where the table is of these sources, compile one case of each launcher alone",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    parser.add_argument("--json", type=Path, help="a file for what the test reads")
    options = parser.parse_args()
    if options.write and (options.only or options.target or options.changed):
        parser.error("--write takes all cases and targets")
    jobs = [
        (index, target)
        for index, case in enumerate(CASES)
        for target in options.target or case.targets
        if options.only in f"{case.module} {case.name}"
    ]
    same = options.changed and settled()
    if same:
        jobs = list(
            {CASES[index].call: (index, target) for index, target in reversed(jobs)}.values()
        )
    kernels, failed = compile_all(sorted(jobs), options.processes)
    if options.write:
        options.write.write_text(HEADER.format(sources=sources()) + sass.write_table(kernels))
    lines = failed + compare(kernels) + (differences(kernels) if same else [])
    if options.json:
        rows, of = [sass.key(k) for k in kernels], {(CASES[i].name, str(t)) for i, t in jobs}
        found = {"rows": rows, "jobs": sorted(of), "faults": lines}
        options.json.write_text(json.dumps(found))
    show(kernels)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
