"""The process that trains: device, threads, determinism, signals, random generators, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from deepfast.mt.training.errors import expect
from deepfast.mt.training.recipe import TrainSection

SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
"""The signals that stop a run with a checkpoint, and the exit codes of the command line."""
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that makes matrix products on a GPU deterministic."""


def resolve_device(name: str | None) -> torch.device:
    """The device that a recipe names; None stands for cuda, or cpu where there is no GPU.

    Under torchrun each rank of a machine has the GPU of its number.

    Raises:
        RecipeError: this machine has no such device.
    """
    count, local = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    name = name or ("cuda" if count else "cpu")
    if name == "cuda" and local is not None:
        name = f"cuda:{local}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    fits = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count)
    expect(fits, "train.device", f"cpu, cuda or cuda:N, of {count} CUDA devices", name)
    if device.type == "cuda" and local is not None:
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def settings(section: TrainSection) -> Iterator[None]:
    """Seeds torch and Python, and sets threads and determinism until the block ends."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warns, workspace = torch.is_deterministic_algorithms_warn_only_enabled(), os.environ.get(CUBLAS)
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    if section.deterministic:
        # cuBLAS reads this when it starts; without it torch refuses matrix products.
        os.environ.setdefault(CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(section.seed)
    random.seed(section.seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        if workspace is None:
            os.environ.pop(CUBLAS, None)


class StopSignal:
    """Notes the first of `SIGNALS`, for the run to stop; a second Ctrl-C or SIGTERM ends the
    process. A signal that the process ignores stays ignored.

    Only the main thread may handle signals: in others this does nothing.

    Args:
        stays: a second signal changes nothing. Under torchrun a scheduler's signal comes twice,
            from the scheduler and from torchrun.
    """

    def __init__(self, *, stays: bool = False) -> None:
        self.stays = stays
        self.name: str | None = None
        """One of `SIGNALS` once it has arrived."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in map(signal.Signals.__getitem__, SIGNALS):
                # Such as SIGHUP under nohup.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def _arrived(self, number: int, frame: Any) -> None:
        self.name = self.name or signal.Signals(number).name
        if not self.stays:
            # Not SIGHUP: a closed terminal sends it twice, its shell does and the kernel.
            self._restore(signal.SIGINT, signal.SIGTERM)

    def __exit__(self, *error: object) -> None:
        self._restore(*self._before)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before[number])


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the random generators that training uses, as plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def release_freed_memory() -> None:
    """Returns freed memory that the C library has kept to the system (glibc only).

    Without this, batches of many sizes let a process grow to twice its live memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_bytes(device: torch.device) -> int:
    """Peak of the CUDA allocator; on the CPU peak of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
