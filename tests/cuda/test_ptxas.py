"""The CUDA kernels compile for every architecture, without a register spill."""

import pytest

from deepfast import build
from tests.cuda import ptxas


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
def test_every_kernel_compiles_without_spills():
    assert ptxas.main() == 0


SAID = """
ptxas info    : Compiling entry function '_Z8a_kernelv' for 'sm_90'
ptxas info    : Function properties for _Z8a_kernelv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem
ptxas info    : Compiling entry function '_Z8b_kernelv' for 'sm_90'
ptxas info    : Function properties for _Z8b_kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_spills_are_found():
    assert ptxas.spills(SAID) == ["_Z8a_kernelv for sm_90: 16 bytes of stack, 12 of spills"]
