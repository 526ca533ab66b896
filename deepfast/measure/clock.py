"""Timing on a noisy machine: variants take turns in one process, and medians are reported.

A time alone means little; a ratio between variants of one run is reliable. The copy bandwidth of
the machine is measured in the same run and compared with a kernel's bytes per second.
"""

import ctypes
import statistics
from collections.abc import Callable, Mapping

import torch

from deepfast.clock import Clock, on_cpu, take_turns
from deepfast.measure.rows import Row

COPY = "copy"


def keep_memory() -> bool:
    """Tells glibc to keep freed memory until the process ends; False without glibc.

    By default glibc returns large blocks to the system and faults them in again, page by page. That
    can cost more than the work on them, and chance decides which variant pays for it.
    """
    trim_threshold, mmap_threshold, most = -1, -3, (1 << 31) - 1
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(trim_threshold, most) and libc.mallopt(mmap_threshold, most))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    clock: Clock = on_cpu,
) -> dict[str, Row]:
    """Rows of variants that take turns, see `deepfast.clock.take_turns`."""
    found = take_turns(variants, rounds=repeats, warmup=warmup, clock=clock)
    return {name: Row(variant=name, seconds=seconds) for name, seconds in found.items()}


def ratio(slow: Row, fast: Row) -> float:
    """How many times faster ``fast`` is: the median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))


def copy_variant(nbytes: int = 1 << 27) -> tuple[Callable[[], object], int]:
    """A plain copy, for comparison, and the bytes that it moves (one read and one write)."""
    source = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * nbytes


def copy_bandwidth() -> float:
    """GB/s of a plain copy, read plus written bytes."""
    run, nbytes = copy_variant()
    return nbytes / interleave({COPY: run}, repeats=9)[COPY].median / 1e9
