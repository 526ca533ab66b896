"""Every op test runs on poisoned memory, on one thread, and on the emulated CUDA kernels too."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned_on_one_thread(poison, threads):
    """Fresh memory is NaN. One thread, unless a test asks for more: most tensors here are tiny."""
    with threads(1):
        yield


@pytest.fixture
def backend(kernel_backend):
    """Each backend that can run here, by name; one without the test's dtype is skipped."""
    return kernel_backend
