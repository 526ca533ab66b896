"""The kernels of a GPU without one: Triton's in its interpreter, CUDA's over the emulator of
tests/cuda, against the launchers of the reference in float64."""

import pytest
import torch

from deepfast import backend


@pytest.fixture(params=["triton", "cuda"])
def kernels(request):
    """The launches behind the test file's ``OP``, by each backend."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    else:
        pytest.importorskip("triton")
    device = "cpu" if request.param == "cuda" or not torch.cuda.is_available() else "cuda"
    return backend.choose(request.module.OP, request.param, device, torch.float32)[1]
