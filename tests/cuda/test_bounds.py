"""Accesses of the CUDA kernels behind operands and behind shared memory, over the emulator."""

import os
import subprocess
import sys

import pytest

from tests.cuda.build import BuildError, build, compiler, sanitizer

PROGRAM = """
import ctypes, sys, torch
from bench.gpu import launches
torch.ops.load_library(sys.argv[1])
ops = torch.ops.deepfast_emulated
if sys.argv[2:] == ["short"]:
    given = launches.operands("boundary_forward", 3, 8, torch.float32, "cpu", {})
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    memory = (ctypes.c_float * 8).from_address(malloc(ctypes.c_size_t(6 * 4)))
    given["out_norm_bias"] = torch.frombuffer(memory, dtype=torch.float32)
    ops.boundary_forward(**given)
else:
    for tokens, dim in ((3, 100), (2, 512)):
        launches.every_launch(ops, "cpu", tokens, dim)
"""


def run(*words) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "LD_PRELOAD": sanitizer(), "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(build(bounds=True)), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.exhaustive
@pytest.mark.skipif(compiler() is None or sanitizer() is None, reason="needs g++ with libasan")
def test_no_access_out_of_bounds():
    try:
        short = run("short")
    except BuildError as error:
        pytest.skip(str(error))
    # It sees the reads of a bias that says eight channels and has memory for six.
    assert "heap-buffer-overflow" in short.stderr
    assert short.returncode != 0
    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
