"""Triton's compiler without a GPU, for programs that compile the kernels and run none. They turn
the interpreter off before they import triton."""

from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget


def use_target(target: int) -> None:
    """Makes Triton and the launchers behave as if there were a GPU.

    Triton 3.6 to 3.9 call these three functions of the driver before a kernel runs.
    """
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target, 32),
        # Compiled kernels are kept by device.
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
