"""Whether Triton compiles every kernel without register spills; needs no GPU.

Each case of `aot_cases.py` calls a launcher; every kernel that it launches is compiled for a
target instead of run, and its machine code is read.

    python tests/kernels/aot.py --only layer_norm --target 90
    python tests/kernels/aot.py --write bench/results/aot.md

Where deepfast is not installed, PYTHONPATH=. goes before them.
"""

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
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

HEADER = f"""\
# Triton compiles its kernels without spills

Triton {triton.__version__}, no GPU; `python tests/kernels/aot.py --write bench/results/aot.md`.
T = {T} tokens, {LAYERS} layers, attention over 8 heads of 64. *spills* counts the accesses to local
memory in the machine code of all kernels of a case.

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
        faults = []
        for what, table in (("kernels of Triton", self.theirs), ("keys", self.keys)):
            faults += [
                f"{k}: {len(others)} {what}" for k, others in table.items() if len(others) > 1
            ]
        return faults


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


def compile_case(index: int, target: int) -> dict:
    """The row of a case for a target, and a line for each fault.

    Needs its own process, because it changes Triton and the launchers.
    """
    case, found = CASES[index], {}
    use_target(target)
    module = importlib.import_module(f"deepfast.kernels.{case.module}")
    common = importlib.import_module("deepfast.kernels.common")
    common.multiprocessors = module.multiprocessors = lambda device: sass.MULTIPROCESSORS[target]
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Returns nothing, so that the launcher keeps no kernel: it would run the next launch.
        found[kernel.hash] = self.__name__, kernel

    JITFunction.run = compile_only
    try:
        case.run(case.launcher)
    finally:
        JITFunction.run = run
    spills, faults = 0, []
    for name, kernel in found.values():
        code, shared = machine_code(kernel), kernel.metadata.shared
        spills += sum(op in sass.SPILLS for op in code)
        lines = sass.faults(name, target, code, shared, triton.__version__)
        faults += [f"{name} on sm_{target} in {case.name}: {line}" for line in lines]
    names = dict.fromkeys(name for name, _ in found.values())
    row = [case.name, str(target), ", ".join(names), str(spills)]
    return {"row": row, "faults": faults}


def machine_code(kernel) -> list[str]:
    """The opcodes of a compiled kernel (`triton.compiler.CompiledKernel`)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sass.OPCODE.findall(text)


# ---- all of them -------------------------------------------------------------------------------


def compile_all(jobs: list[tuple[int, int]], processes: int) -> tuple[list[list[str]], list[str]]:
    """The rows of all (case, target) pairs, and a line for each fault."""
    rows, faults = [], []
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache
        for (index, target), job in [(job, pool.submit(compile_case, *job)) for job in jobs]:
            try:
                found = job.result()
            except Exception as error:
                print(error.__cause__ or error, file=sys.stderr)
                said = (str(error).strip().splitlines() or [""])[-1]
                where = f"{CASES[index].name} on sm_{target}"
                faults.append(f"{where}: launcher failed: {type(error).__name__}: {said}")
            else:
                rows.append(found["row"])
                faults += found["faults"]
    return rows, faults


def table(rows: list[list[str]]) -> str:
    lines = [["case", "sm", "kernels", "spills"], ["---"] * 4, *rows]
    return HEADER + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose file or name holds this text")
    parser.add_argument("--target", type=int, choices=sass.SHARED, action="append")
    parser.add_argument("--sample", action="store_true", help="one case of each launcher alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    parser.add_argument("--json", type=Path, help="a file for what the test reads")
    options = parser.parse_args()
    jobs = [
        (index, target)
        for index, case in enumerate(CASES)
        for target in options.target or case.targets
        if options.only in f"{case.module} {case.name}"
    ]
    if options.sample:
        jobs = sorted({CASES[job[0]].launch: job for job in reversed(jobs)}.values())
    rows, faults = compile_all(jobs, options.processes)
    text = table(rows)
    print(text)
    if options.write:
        options.write.write_text(text)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "faults": faults}))
    print("\n".join(faults) or "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
