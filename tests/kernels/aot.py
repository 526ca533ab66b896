"""Triton compiles every kernel for sm_80, sm_90 and sm_100, without a register spill; no GPU.

A call of each launch is compiled for a target instead of run, and the machine code of its kernels
is read. It must also have no atomics, which add in any order, and not more shared memory than there
is.

    python -m tests.kernels.aot                                   # all launches for all targets
    python -m tests.kernels.aot --only layer_norm --target 90 --dim 4096 --dtype float32
"""

import argparse
import concurrent.futures
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from itertools import chain

# Read when triton is imported. The interpreter compiles nothing.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.runtime.jit import JITFunction

from deepfast import backend
from deepfast.launches import LAUNCHES
from tests.kernels.calls import chosen, without_memory
from tests.kernels.without_gpu import use_target

# Packed batches have any number of tokens: not a multiple of 16, so no kernel may count on it.
T, LAYERS, BLOCK = 8190, 100, 8
FIRST = LAYERS + 1 - BLOCK
CHOICES = {
    "activation": {"kind": "gelu", "D": 2048},
    "depth_mix": {"K": 16},
    "depth_attention": {"K": 16},
    "attention_boundary": {"bias": False, "dbias": False},
    "attention": {"reach": (-1, 0), "length": 128},
    "linear_cross_entropy": {"V": 32000},
    "peephole_lstm": {"H": 512},
}
"""By op the choices of its launches that are not the first of `calls.choices`."""
LISTS = {
    # A state in the middle of its block of eight.
    "forward": {"near": range(24, 32), "pull_rows": range(31, 32), "k": 31, "grad_slot": 32},
    "backward": {"near": range(24, 28), "pull_rows": range(27, 32), "k": 27, "grad_slot": 28},
    # Far passes into and out of a block.
    "rows": {"sources": range(FIRST), "rows": range(FIRST, LAYERS + 1)},
    "pull": {"sources": range(BLOCK), "rows": range(BLOCK, LAYERS + 1)},
}
"""By a word of a launch over depth its lists."""

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""By target the bytes of shared memory that a program may have."""
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
UNWANTED = {"LDL", "STL", "ATOM", "ATOMG", "RED", "REDG", "UTMAREDG"}
"""Instructions of spills, and atomics."""


def record(launch, given):
    """The operands of a call, at the sizes of a deep stack, with the choices that are given."""
    choices, sizes = CHOICES.get(launch.op, {}) | given, {"T": T, "Q": T, "N": 64}
    sizes |= {"R": LAYERS + 1, "S": LAYERS + 2, "P": 3, "reverse": True}
    if "boundary" in launch.op:
        words = LISTS["pull" if "pull" in launch.name else launch.name.rpartition("_")[2]]
        sizes |= {name: words[name] for name in ("k", "grad_slot") if name in words}
        choices = choices | words
    return without_memory(launch, chosen(launch, **choices), **sizes)


def compile_call(name: str, target: int, given: dict) -> list[str]:
    """A line for each fault. Needs its own process, because it changes Triton and the launchers."""
    found, run = {}, JITFunction.run
    use_target(target)
    launcher = backend.launchers(LAUNCHES[name].op, "triton")[name]
    common = importlib.import_module("deepfast.kernels.common")
    module = importlib.import_module(launcher.__module__)
    common.multiprocessors = module.multiprocessors = lambda device: MULTIPROCESSORS[target]

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Returns nothing, so that the launcher keeps no kernel: it would run the next launch.
        found[kernel.hash] = self.__name__, kernel

    JITFunction.run = compile_only
    try:
        launcher(record(LAUNCHES[name], given))
    finally:
        JITFunction.run = run
    return [
        f"{kernel} on sm_{target} in {name}: {fault}"
        for kernel, made in found.values()
        for fault in faults(made, target)
    ]


def faults(kernel, target: int) -> list[str]:
    """A line for each fault of a compiled kernel (`triton.compiler.CompiledKernel`)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code, found = OPCODE.findall(listing), []
    if "EXIT" not in code:
        found.append("its machine code has no instructions that are known here")
    found += [f"{code.count(op)} times {op}" for op in sorted(UNWANTED & set(code))]
    if (shared := kernel.metadata.shared) > SHARED[target]:
        found.append(f"expected at most {SHARED[target]} bytes of shared memory, got {shared}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="launches whose name holds this text")
    parser.add_argument("--target", type=int, choices=SHARED, action="append")
    parser.add_argument("--dim", type=int, help="channels, where another number is not fixed")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    given = {} if options.dim is None else {"D": options.dim}
    given |= {} if options.dtype is None else {"dtype": getattr(torch, options.dtype)}
    names = [name for name in LAUNCHES if options.only in name]
    jobs = [(name, target, given) for name in names for target in options.target or SHARED]
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache
        found = list(chain(*pool.map(compile_call, *zip(*jobs, strict=True))))
    if found:
        sys.exit("\n".join(found))
    print(f"Triton {triton.__version__}: {len(jobs)} calls compiled")


if __name__ == "__main__":
    main()
