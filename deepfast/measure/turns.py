"""Variants that take turns: rows of measurements, and how they are filled.

A time alone means little; a ratio between variants of one run is reliable. The copy bandwidth of
the machine is measured in the same run and compared with a kernel's bytes per second.
"""

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch

from deepfast.clock import Clock, on_cpu
from deepfast.machine import free_bytes
from deepfast.measure.console import progress
from deepfast.memory import LiveBytes

COPY, GIB = "copy", 1 << 30


@dataclass(kw_only=True, eq=False)
class Row:
    """The measurements of one variant of one case. A number that was not measured is None."""

    variant: str
    what: str = ""
    """The case, if a table has several."""
    depth: int | None = None
    """Layers."""
    tokens: int = 0
    """Tokens of a step."""
    seconds: list[float] = field(default_factory=list)
    """The timed runs."""
    nbytes: int | None = None
    """Bytes that the algorithm has to move."""
    peak_bytes: int | None = None
    """Peak bytes of live tensors that the run made, gradients included."""
    predicted_bytes: int | None = None
    """The same number, from a closed form or from the planner."""
    expected: float | None = None
    """The time over that of the base, as the planner expects it."""
    counted: bool = True
    """Whether its memory is counted. What counts it keeps `torch.compile` from running its code."""
    note: str | None = None
    """Why a number is missing, or how this row was measured differently from the rest."""
    base: "Row | None" = field(default=None, repr=False)
    """The row of the same case that others are compared with."""
    copy: "Row | None" = field(default=None, repr=False)
    """The plain copy that took turns with it."""

    @property
    def relative(self) -> list[float]:
        """The time over that of the base, in each round."""
        return [] if self.base is None else ratios(self.seconds, self.base.seconds)

    @property
    def of_copy(self) -> list[float]:
        """The bandwidth over that of the copy, in each round."""
        if self.copy is None or not self.nbytes or not self.copy.nbytes:
            return []
        return [r * self.nbytes / self.copy.nbytes for r in ratios(self.copy.seconds, self.seconds)]

    def as_dict(self) -> dict:
        """The measurements as plain values, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (COPY, "base")}
        step, planned = median(self.seconds), self.predicted_bytes
        return own | {
            "base": self.base.variant if self.base else None,
            "median_seconds": step,
            "tokens_per_second": self.tokens / step if step else None,
            "relative": median(self.relative),
            "of_copy": median(self.of_copy),
            "predicted_over_peak": planned / self.peak_bytes
            if planned and self.peak_bytes
            else None,
        }


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """How many times faster ``fast`` is, in each round that both have ended."""
    return [a / b for a, b in zip(slow, fast, strict=False)]


class Part(Protocol):
    """A part of the measurements."""

    part: str
    """Its name, for the progress bar."""

    def work(self) -> Iterator[str]:
        """Measures; says before each piece what it is."""


@dataclass
class Turns:
    """Variants of one case: each runs once with its memory counted, then they are timed in turn."""

    part: str
    rows: list[Row]
    """A row for each variant, to be filled. If its ``predicted_bytes`` exceed the free memory, the
    variant does not run and the row's note says so."""
    make: Callable[[], Any]
    """Builds what the variants share. Its method ``run`` takes a row and leaves no gradients."""
    rounds: int = 0
    """How often each variant is timed."""
    clock: Clock = on_cpu
    base: str = ""
    """The variant that the others of a case are compared with."""

    def __post_init__(self) -> None:
        known = {(row.what, row.variant): row for row in self.rows}
        for row in self.rows:
            row.base, row.copy = known.get((row.what, self.base)), known.get((COPY, COPY))

    def work(self) -> Iterator[str]:
        case = self.make()
        for number in range(1 + self.rounds):
            for row in self.rows:
                depth, run = f"{row.depth} layers" if row.depth else "", partial(case.run, row)
                kind = "time" if number else "memory"
                yield f"{' '.join(filter(None, (depth, row.what, row.variant)))}: {kind}"
                if number == 0:
                    _count(row, run)
                elif row.peak_bytes is not None or not row.counted:
                    row.seconds.append(self.clock(run))


def _count(row: Row, run: Callable[[], object]) -> None:
    """One run with its memory counted, which is also the warm-up of the timed runs."""
    free = free_bytes() - GIB
    if row.predicted_bytes is not None and row.predicted_bytes > free:
        row.note = (
            f"does not fit: needs {row.predicted_bytes / GIB:.2g} GiB, "
            f"{max(free, 0) / GIB:.2g} GiB are free"
        )
        return
    if not row.counted:
        run()
        return
    with LiveBytes() as live:
        run()
    row.peak_bytes = live.peak


def measure(parts: Sequence[Part]) -> None:
    """Measures the parts in order, with a progress bar."""
    with progress(len(parts)) as step:
        for done, part in enumerate(parts):
            for what in part.work():
                step(done, f"{part.part}: {what}")


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


def copy_variant(
    nbytes: int = 1 << 27, device: torch.device | str = "cpu"
) -> tuple[Callable[[], object], int]:
    """A plain copy, for comparison, and the bytes that it moves (one read and one write)."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * nbytes
