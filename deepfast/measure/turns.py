"""Variants of one case: each runs once with its memory counted, then they are timed in turn."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Protocol

from deepfast.clock import on_cpu
from deepfast.measure.machine import ResidentPeak, free_bytes
from deepfast.measure.progress import Job
from deepfast.measure.rows import Row
from deepfast.memory import LiveBytes

GIB = 1 << 30


class Case(Protocol):
    """The tensors that all variants share."""

    def run(self, variant: str) -> None:
        """One run of a variant; leaves no gradients."""


class Variant(NamedTuple):
    """One of the variants that take turns."""

    row: Row
    """If its ``predicted_bytes`` exceed the free memory, the variant does not run and the row's
    note says so."""
    rounds: int
    """How often it is timed."""
    work: float
    """About how many seconds a run takes."""


def turns(part: str, label: str, variants: list[Variant], make: Callable[[], Case]) -> list[Job]:
    """The jobs that fill the variants' rows.

    Args:
        part, label: for the progress bar.
        make: builds the case when the first job runs; it lives until the last job is dropped.
    """
    case = cache(make)

    def job(variant: Variant, what: str, run: Callable) -> Job:
        row = variant.row
        return Job(part, f"{label}, {row.variant}: {what}", variant.work, partial(run, row, case))

    jobs = [job(variant, "memory", _count) for variant in variants]
    for number in range(max(variant.rounds for variant in variants)):
        jobs += [job(variant, "time", _time) for variant in variants if number < variant.rounds]
    return jobs


def _count(row: Row, case: Callable[[], Case]) -> None:
    """One run with its memory counted, which is also the warm-up of the timed runs."""
    free = free_bytes() - GIB
    if row.predicted_bytes is not None and row.predicted_bytes > free:
        row.note = (
            f"does not fit: needs {row.predicted_bytes / GIB:.2g} GiB, "
            f"{max(free, 0) / GIB:.2g} GiB are free"
        )
        return
    run = partial(case().run, row.variant)
    with ResidentPeak() as resident, LiveBytes() as live:
        run()
    row.peak_bytes, row.resident_bytes = live.peak, resident.nbytes


def _time(row: Row, case: Callable[[], Case]) -> None:
    if row.peak_bytes is not None:
        row.seconds.append(on_cpu(partial(case().run, row.variant)))
