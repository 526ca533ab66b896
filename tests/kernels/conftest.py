"""The kernels of a GPU without one: Triton's in its interpreter, CUDA's over the emulator of
tests/cuda. Each launch is compared with that of the reference in float64."""

import pytest
import torch

from deepfast import backend


@pytest.fixture
def kernels(request):
    """The launches of an op by Triton, or by the backend that a test names: ``kernels(op)``."""
    by = getattr(request, "param", "triton")
    if by == "cuda":
        request.getfixturevalue("emulated")
    elif by == "triton":
        pytest.importorskip("triton")
    elif not backend.compiled():
        pytest.skip("needs the compiled library")
    return lambda op: backend.choose(op, by, "cpu", torch.float32)[1]
