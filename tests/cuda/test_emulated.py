"""The CUDA kernels over the emulator: their accesses to memory, and blocks with less of it."""

import os
import subprocess
import sys

import pytest
import torch

from deepfast import availability, backend
from tests.cuda.build import BuildError, build, compiler, every_launch, sanitizer


@pytest.mark.parametrize(("kilobytes", "dim"), [(99, 509), (99, 4096), (163, 8192)])
def test_every_launch_fits(emulated, monkeypatch, kilobytes, dim):
    """Blocks of sm_86 and sm_89 have 99 KB of shared memory, those of sm_80 163 KB."""
    monkeypatch.setenv("EMULATOR_SHARED", str(kilobytes))
    # The first block shows what a block asks for and what it does with it.
    monkeypatch.setenv("EMULATOR_BLOCKS", "1")
    every_launch(emulated, 1, dim)


def test_a_row_too_wide_is_told(monkeypatch):
    class Properties:
        shared_memory_per_block_optin = 99 << 10

    for name in ("_library_with_cuda", "_triton"):
        monkeypatch.setattr(availability, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    half = torch.bfloat16
    assert backend.why_unable("boundary", "cuda", "cuda", half, 4096) is None
    assert "at most 4096 channels" in backend.why_unable("boundary", "cuda", "cuda", half, 4097)
    Properties.shared_memory_per_block_optin = 163 << 10
    assert backend.why_unable("boundary", "cuda", "cuda", half, 8192) is None


PROGRAM = """
import ctypes, sys, torch
from tests.cuda.build import every_launch, numbers
torch.ops.load_library(sys.argv[1])
ops = torch.ops.deepfast_emulated
if sys.argv[2:] == ["short"]:
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    memory = (ctypes.c_float * 8).from_address(malloc(ctypes.c_size_t(6 * 4)))
    bias = torch.frombuffer(memory, dtype=torch.float32)
    ops.boundary_forward(**numbers("boundary_forward", T=3, D=8, out_norm_bias=bias))
else:
    for tokens, dim in ((3, 100), (2, 512)):
        every_launch(ops, tokens, dim)
"""


def checked(*words) -> subprocess.CompletedProcess:
    environment = os.environ | {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", PROGRAM, str(build(bounds=True)), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None or sanitizer() is None, reason="needs g++ with libasan")
def test_no_access_out_of_bounds():
    try:
        short = checked("short")
    except BuildError as error:
        pytest.skip(f"needs a build: {error}")
    # It sees the reads of a bias that says eight channels and has memory for six.
    assert "heap-buffer-overflow" in short.stderr
    assert short.returncode != 0
    done = checked()
    assert done.returncode == 0, done.stderr[-3000:]
