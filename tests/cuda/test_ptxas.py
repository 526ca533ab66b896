"""The CUDA kernels compile for every architecture, without a register spill."""

import pytest

from deepfast import build
from tests.cuda import ptxas


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
def test_every_kernel_compiles_without_spills():
    assert ptxas.main() == 0
