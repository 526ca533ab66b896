"""Timing that survives a noisy machine: variants take turns in one process, medians are quoted.

A time alone means nothing; a ratio between variants of one run does. The copy bandwidth of the
machine is measured in the same run, and a kernel's bytes per second are quoted against it.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Timing:
    """Seconds of one variant's counted runs."""

    name: str
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_second(self) -> float:
        """1e9 bytes per second, of the bytes that the algorithm has to move."""
        return self.nbytes / self.median / 1e9


def keep_memory() -> bool:
    """Tells glibc to keep freed memory for the rest of the process; False where there is no glibc.

    By default it hands large blocks back and faults them in again, page by page, which can cost
    more than the work on them and falls on one variant or another by luck.
    """
    trim_threshold, mmap_threshold, most = -1, -3, (1 << 31) - 1
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(trim_threshold, most) and libc.mallopt(mmap_threshold, most))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def interleave(
    variants: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    nbytes: dict[str, int] | None = None,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Runs every variant in turn, ``repeats`` rounds after ``warmup`` uncounted ones."""
    timings = {name: Timing(name, nbytes=(nbytes or {}).get(name, 0)) for name in variants}
    for round_number in range(warmup + repeats):
        for name, run in variants.items():
            start = _now(device)
            run()
            elapsed = _now(device) - start
            if round_number >= warmup:
                timings[name].seconds.append(elapsed)
    return timings


def ratio(slow: Timing, fast: Timing) -> float:
    """How many times faster ``fast`` is: the median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))


def copy_variant(nbytes: int = 1 << 27, device: str = "cpu") -> tuple[Callable[[], object], int]:
    """A plain copy and the bytes it moves (one read and one write), to compare kernels with."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * nbytes
