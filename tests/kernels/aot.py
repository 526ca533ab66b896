"""Triton compiles every kernel for sm_80, sm_90 and sm_100, without a register spill; no GPU.

Each call below is compiled for a target instead of run, and the machine code of its kernels is
read.

    python -m tests.kernels.aot                                   # all calls for all targets
    python -m tests.kernels.aot --only layer_norm --target 90
    python -m tests.kernels.aot --main                            # one call of each launcher
"""

import argparse
import concurrent.futures
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile

# Read when triton is imported. The interpreter compiles nothing.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.runtime.jit import JITFunction

from deepfast.launches import LAUNCHES
from tests.kernels import sass
from tests.kernels.calls import chosen, without_memory
from tests.kernels.without_gpu import launcher_of, use_target

# Packed batches have any number of tokens: not a multiple of 16, so no kernel may count on it.
T, LAYERS = 8190, 100
DEPTH = {"R": LAYERS + 1, "S": LAYERS + 2}
ALL = range(LAYERS + 1)
FULL = {"dtype": torch.float32}


def both(op: str, *calls: dict) -> list[tuple[str, dict]]:
    """Calls of the launches of both directions."""
    return [(f"{op}_{way}", call) for way in ("forward", "backward") for call in calls]


def far(block: int, **call) -> list[tuple[str, dict]]:
    """Far passes into and out of a block of this size, by DLCL and by attention."""
    first = LAYERS + 1 - block
    mix = {"sources": ALL[:first], "rows": ALL[first:]} | call
    pull = {"sources": ALL[:block], "rows": ALL[block:]} | call
    by_attention = [("attend_rows", ATTEND | mix), ("attend_pull", ATTEND | pull)]
    return by_attention if "kind" in call else [("mix_rows", mix), ("pull_rows", pull)]


PLAIN = dict.fromkeys(("residual", "dsum", "dresidual"), False) | {"dropout_p": 0.0}
RMS = {"rms": True, "source_rms": True, "out_rms": True} | dict.fromkeys(
    ("bias", "dbias", "norm_bias", "dnorm_bias", "out_norm_bias", "dout_norm_bias"), False
)
ATTEND = {"kind": "softmax", "bias": False, "dbias": False}
RELU = {"kind": "relu", "bias": True, "dbias": True}
SCORED = {"query": False, "K": 7, "H": 4}
WEIGHTED = {"query": False, "most": False, "K": 16, "H": 4}
CAUSAL, GROUPS = {"reach": (-1, 0)}, {"H": 2, "G": 4}
NEAR = {"reach": (64, 64), "length": 1024, "H": 8}

CALLS = [
    *both("layer_norm", {}, {"D": 4096}, PLAIN, FULL, RMS),
    *both("activation", {"kind": "gelu", "D": 2048}, {"kind": "relu", "D": 2048}),
    *both("activation", {"kind": "gelu", "D": 2048} | FULL),
    *both("depth_mix", {"K": 16}, {"K": 33}, {"K": 16} | FULL),
    *both("depth_attention", {"K": 16}, {"K": 33, "H": 4}, SCORED, WEIGHTED, WEIGHTED | FULL),
    *both("depth_attention", {"K": 16} | FULL),
    *far(8), *far(16), *far(8, **FULL),
    *both("boundary", {}, {"D": 4096}, FULL, RMS),
    *far(8, **ATTEND), *far(16, **ATTEND), *far(8, **ATTEND, D=1024), *far(4, **ATTEND, D=4096),
    *far(8, **RELU), *far(8, **ATTEND, **FULL),
    *both("attention_boundary", ATTEND, ATTEND | {"D": 4096}, RELU, ATTEND | FULL, ATTEND | RMS),
    *both("attention", CAUSAL | {"length": 128}, CAUSAL | {"length": 512}, {"length": 64}),
    *both("attention", {"length": 512}, {"length": 128} | FULL),
    *both("attention", CAUSAL | GROUPS | {"length": 128}, GROUPS | {"length": 64}),
    *both("attention", GROUPS | {"reach": (255, 0), "length": 1024}),
    *both("attention", GROUPS | {"reach": (255, 0), "length": 1024, "E": 128}),
    *both("attention", {"reach": (16, 16), "length": 128}, NEAR, NEAR | GROUPS | FULL),
    ("cross_entropy", {"V": 32000}), ("cross_entropy", {"V": 32000} | FULL),
    *both("peephole_lstm", {}, FULL),
]  # fmt: skip
"""A launch and the choices of `calls`; the first of a launch is its main one."""


def record(name: str, call: dict):
    """The operands of a call, at the sizes of a deep stack."""
    launch = LAUNCHES[name]
    sizes = {"T": T, "Q": T, "N": 256, "P": 3, "reverse": True} | DEPTH
    if "boundary" in name:
        # A state in the middle of its block of eight.
        k = 31 if name.endswith("forward") else 27
        call = {"near": ALL[24 : k + 1], "pull_rows": ALL[k:32]} | call
        sizes |= {"k": k, "grad_slot": k + 1}
    if name == "cross_entropy":
        sizes |= {"T": 256}
    if name.startswith("peephole"):
        sizes |= {"N": 64, "H": 512}
    v = chosen(launch, **call)
    if launch.op == "attention":
        # As a projection gives them: views of one packed tensor.
        heads, keys, width = v["H"] * v["G"], v["G"], v["E"]
        sizes |= {"scale": width**-0.5}
        for d in ("", "d"):
            packed = torch.empty(T, heads + 2 * keys, width, dtype=v["dtype"], device="meta")
            views = packed.split((heads, keys, keys), 1)
            sizes |= {d + x: view for x, view in zip("qkv", views, strict=True)}
    return without_memory(launch, v, **sizes)


def compile_call(name: str, call: dict, target: int) -> list[str]:
    """A line for each fault. Needs its own process, because it changes Triton and the launchers."""
    found, run = {}, JITFunction.run
    use_target(target)
    launcher = launcher_of(LAUNCHES[name])
    common = importlib.import_module("deepfast.kernels.common")
    module = importlib.import_module(launcher.__module__)
    common.multiprocessors = module.multiprocessors = lambda device: sass.MULTIPROCESSORS[target]

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Returns nothing, so that the launcher keeps no kernel: it would run the next launch.
        found[kernel.hash] = self.__name__, kernel

    JITFunction.run = compile_only
    try:
        launcher(record(name, call))
    finally:
        JITFunction.run = run
    return [
        f"{kernel} on sm_{target} in {name} {call}: {fault}"
        for kernel, made in found.values()
        for fault in sass.faults(
            kernel, target, listing(made), made.metadata.shared, triton.__version__
        )
    ]


def listing(kernel) -> str:
    """The machine code of a compiled kernel (`triton.compiler.CompiledKernel`)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="launches whose name holds this text")
    parser.add_argument("--target", type=int, choices=sass.SHARED, action="append")
    parser.add_argument("--main", action="store_true", help="the first call of each launch alone")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    calls = list(dict(reversed(CALLS)).items()) if options.main else CALLS
    jobs = [
        (name, call, target)
        for name, call in calls
        for target in options.target or sass.SHARED
        if options.only in name
    ]
    faults, spawn = [], multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache
        for job, made in [(job, pool.submit(compile_call, *job)) for job in jobs]:
            try:
                faults += made.result()
            except Exception as error:
                faults.append(f"{job}: {type(error).__name__}: {error.__cause__ or error}")
    print("\n".join(faults))
    names = {name for name, _, _ in jobs}
    print(f"Triton {triton.__version__}: {len(jobs)} calls of {len(names)} launches compiled")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
