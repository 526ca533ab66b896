"""Every op test runs on poisoned memory, on one thread, and on the emulated CUDA kernels too."""

import pytest
import torch

from deepfast import backend as backends


@pytest.fixture(autouse=True)
def _poisoned_on_one_thread(poison, threads):
    """Fresh memory is NaN. One thread, unless a test asks for more: most tensors here are tiny."""
    with threads(1):
        yield


@pytest.fixture(params=["cpu", "reference", "cuda"])
def backend(request):
    """Each backend that can run here, by name; one that has not the test's dtype is skipped."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    dtype = torch.float32
    if "dtype" in request.fixturenames:
        dtype = request.getfixturevalue("dtype")
    reason = backends.refusal("layer_norm", request.param, "cpu", dtype)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=["cpu", "reference", "triton", "cuda"])
def any_backend(request):
    """Each backend that has kernels here; Triton's run in its interpreter, CUDA's are emulated."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param
