"""The kernels of a GPU without one: Triton's in its interpreter, CUDA's over the emulator of
tests/cuda. Each launch is compared with that of the reference in float64."""

import pytest
import torch

from deepfast import backend


@pytest.fixture(params=["triton", "cuda"])
def kernels(request):
    """The launches of an op by each backend, ``kernels(op)``; skips an op that CUDA lacks."""
    by = request.param
    if by == "cuda":
        request.getfixturevalue("emulated")
    else:
        pytest.importorskip("triton")
    device = "cpu" if by == "cuda" or not torch.cuda.is_available() else "cuda"

    def of(op):
        if by == "cuda" and op in backend.NO_CUDA:
            pytest.skip(f"{op} has no CUDA kernel")
        return backend.choose(op, by, device, torch.float32)[1]

    return of
