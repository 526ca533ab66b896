"""The CUDA kernels over the emulator: their accesses to memory, and blocks with less of it; and by
nvcc, where it is."""

from types import SimpleNamespace

import pytest
import torch

from deepfast import availability, backend
from deepfast.build import find_nvcc
from tests.cuda import ptxas
from tests.cuda.build import BuildError, build, compiler, every_launch, sanitizer


@pytest.mark.parametrize(("kilobytes", "most"), [(99, 4096), (163, 8192)])
def test_every_launch_fits(emulated, monkeypatch, kilobytes, most):
    """Blocks of sm_86 and sm_89 have 99 KB of shared memory, those of sm_80 163 KB. Wider rows than
    fit are refused."""
    monkeypatch.setenv("EMULATOR_SHARED", str(kilobytes))
    # The first block shows what a block asks for and what it does with it.
    monkeypatch.setenv("EMULATOR_BLOCKS", "1")
    every_launch(emulated, 1, most)
    found = SimpleNamespace(shared_memory_per_block_optin=kilobytes << 10)
    monkeypatch.setattr(availability, "_triton", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    at = "boundary", "cuda", "cuda", torch.bfloat16
    assert backend.why_unable(*at, most) is None
    assert f"at most {most} channels" in backend.why_unable(*at, most + 1)


PROGRAM = """
import sys, torch
from tests.cuda.build import every_launch
torch.ops.load_library(sys.argv[1])
for tokens, dim in ((3, 100), (2, 512)):
    every_launch(torch.ops.deepfast_emulated, tokens, dim)
"""


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None or sanitizer() is None, reason="needs g++ with libasan")
def test_no_access_out_of_bounds(python):
    try:
        library = str(build(bounds=True))
    except BuildError as error:
        pytest.skip(f"needs a build: {error}")
    variables = {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
    python("-c", PROGRAM, library, **variables, timeout=900)


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_every_kernel_compiles_without_spills():
    assert ptxas.main() == 0
