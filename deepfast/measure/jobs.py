"""Jobs that measure, one after another, for the report and for `python -m bench`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from deepfast.clock import Clock, on_cpu
from deepfast.machine import free_bytes
from deepfast.measure.clock import Row
from deepfast.measure.console import progress
from deepfast.memory import LiveBytes

GIB = 1 << 30


@dataclass(frozen=True)
class Job:
    """A piece of work; jobs run one after another."""

    part: str
    """The chapter that it is for."""
    label: str
    """What it does, for people."""
    run: Callable[[], object]


@dataclass
class Turns:
    """Variants of one case: each runs once with its memory counted, then they are timed in turn."""

    part: str
    """For the progress bar."""
    rows: list[Row]
    """A row for each variant, to be filled. If its ``predicted_bytes`` exceed the free memory, the
    variant does not run and the row's note says so."""
    make: Callable[[], Any]
    """Builds what the variants share when the first job runs; it lives until the last job is
    dropped. Its method ``run`` takes a row and leaves no gradients."""
    rounds: int = 0
    """How often each variant is timed."""
    clock: Clock = on_cpu

    def jobs(self) -> list[Job]:
        """The jobs that fill the rows."""
        case = cache(self.make)

        def job(row: Row, what: str, fill: Callable) -> Job:
            depth = f"{row.depth} layers" if row.depth else ""
            label = " ".join(filter(None, (depth, row.what, row.variant)))
            return Job(self.part, f"{label}: {what}", partial(fill, row, case))

        jobs = [job(row, "memory", _count) for row in self.rows]
        time = partial(_time, clock=self.clock)
        jobs += [job(row, "time", time) for _ in range(self.rounds) for row in self.rows]
        return jobs


def _count(row: Row, case: Callable[[], Any]) -> None:
    """One run with its memory counted, which is also the warm-up of the timed runs."""
    free = free_bytes() - GIB
    if row.predicted_bytes is not None and row.predicted_bytes > free:
        row.note = (
            f"does not fit: needs {row.predicted_bytes / GIB:.2g} GiB, "
            f"{max(free, 0) / GIB:.2g} GiB are free"
        )
        return
    run = partial(case().run, row)
    if not row.counted:
        run()
        return
    with LiveBytes() as live:
        run()
    row.peak_bytes = live.peak


def _time(row: Row, case: Callable[[], Any], clock: Clock) -> None:
    if row.peak_bytes is not None or not row.counted:
        row.seconds.append(clock(partial(case().run, row)))


def run_jobs(jobs: list[Job], seconds: dict[str, float]) -> None:
    """Runs the jobs in order, with a progress bar; drops each one afterwards, with everything that
    it holds. Adds their wall time to the ``seconds`` of their part."""
    count = len(jobs)
    with progress(count) as step:
        while jobs:
            done, job = count - len(jobs), jobs.pop(0)
            step(done, f"{job.part}: {job.label}")
            began = time.perf_counter()
            try:
                job.run()
            finally:
                took = time.perf_counter() - began
                seconds[job.part] = seconds.get(job.part, 0.0) + took
