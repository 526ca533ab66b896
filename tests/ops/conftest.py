"""Every op test runs on poisoned memory, and on the emulated CUDA kernels too."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


@pytest.fixture
def backend(kernel_backend):
    """Each backend that can run here, by name."""
    return kernel_backend
