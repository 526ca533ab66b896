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

from deepfast.mt.training.errors import RecipeError, expect
from deepfast.mt.training.recipe import TrainSection

SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
"""The signals that stop a run with a checkpoint, and the exit codes of the command line."""


def resolve_device(name: str | None) -> torch.device:
    """The device that a recipe names; None stands for cuda, or cpu where there is no GPU.

    Under torchrun each rank of a machine has the GPU of its number.

    Raises:
        RecipeError: this machine has no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    expect(device.type in ("cpu", "cuda"), "train.device", "cpu, cuda or cuda:N", name)
    if device.type == "cpu":
        return device
    count, local = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    expect((device.index or 0) < count, "train.device", f"one of {count} CUDA devices", name)
    if local is not None:
        fits = device.index is None or os.environ.get("LOCAL_WORLD_SIZE") == "1"
        expect(fits, "train.device", "cuda or cpu under torchrun", name)
        if int(local) >= count:
            raise RecipeError(
                f"torchrun: expected at most {count} ranks on this machine, one for each GPU, got "
                f"{os.environ.get('LOCAL_WORLD_SIZE')}"
            )
        if device.index is None:
            device = torch.device("cuda", int(local))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def settings(section: TrainSection) -> Iterator[None]:
    """Seeds torch and Python, and sets threads and determinism until the block ends."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    if section.deterministic:
        # cuBLAS reads this when it starts; without it torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(section.seed)
    random.seed(section.seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def heeded(*names: str) -> list[int]:
    """The numbers of signals, without those that the system lacks and without a SIGHUP that this
    process ignores, as under nohup."""
    return [
        getattr(signal, name)
        for name in names
        if hasattr(signal, name)
        and not (name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
    ]


class StopSignal:
    """Notes the first of `SIGNALS`, for the run to stop; a second Ctrl-C or SIGTERM ends the
    process.

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
            for number in heeded(*SIGNALS):
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def _arrived(self, number: int, frame: Any) -> None:
        self.name = self.name or signal.Signals(number).name
        if not self.stays:
            # A closed terminal sends SIGHUP twice: its shell does, and the kernel.
            self._restore("SIGINT", "SIGTERM")

    def __exit__(self, *error: object) -> None:
        self._restore(*SIGNALS)

    def _restore(self, *names: str) -> None:
        for number in [n for n in self._before if signal.Signals(n).name in names]:
            # A signal that arrives here restores some of them first.
            if (before := self._before.pop(number, None)) is not None:
                signal.signal(number, before)


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


def memory_bytes(device: torch.device) -> int:
    """Peak of the CUDA allocator; on the CPU the process's resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes(device)


MMAP_THRESHOLD, MAPPED_FROM = -3, 2**20
"""glibc's M_MMAP_THRESHOLD, and our value: larger blocks get pages of their own."""


def give_back_large_blocks() -> None:
    """From now on the C library returns large freed tensors to the system at once (glibc only).

    By default glibc raises its limit as blocks are freed, and then keeps the holes between live
    tensors. With tensors of many sizes these holes reach half of the live memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_FROM)


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
