"""Triton's compiler without a GPU, for programs that compile the kernels and run none. They turn
the interpreter off before they import triton."""

import importlib
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget

from deepfast import backend
from deepfast.kernels.launch import Kernel


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


def launcher_of(launch):
    files = backend.KERNEL_FILES[launch.op]
    modules = [importlib.import_module(f"deepfast.kernels.{file}") for file in files]
    return next(getattr(m, launch.name) for m in modules if hasattr(m, launch.name))


class Keys:
    """`deepfast.kernels.launch` keeps compiled kernels by its own keys. Where Triton would compile
    two kernels, these must differ; else they must not, because each costs a check."""

    def __init__(self):
        self.theirs: dict[tuple, set[str]] = {}
        self.keys: dict[tuple, set] = {}
        variant, self.ours = Kernel.variant, None

        def remember(*given):
            found = variant(*given)
            self.ours = found[0]
            return found

        Kernel.variant = remember

    def add(self, kernel, key) -> None:
        """Called where Triton would compile ``kernel``, with its own key."""
        self.theirs.setdefault((kernel.__name__, self.ours), set()).add(str(key))
        self.keys.setdefault((kernel.__name__, str(key)), set()).add(self.ours)

    def faults(self) -> list[str]:
        tables = {"kernels of Triton": self.theirs, "keys": self.keys}
        return [
            f"{of}: {len(others)} {what}"
            for what, table in tables.items()
            for of, others in table.items()
            if len(others) > 1
        ]
