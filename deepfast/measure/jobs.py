"""The jobs of a report, and a bar that shows the current job and the time left."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from deepfast.clock import on_cpu
from deepfast.measure.machine import ResidentPeak, free_bytes
from deepfast.measure.rows import Row
from deepfast.memory import LiveBytes

GIB = 1 << 30
PRIOR = 20.0
"""After this many seconds of work the measured speed counts as much as the estimates."""


@dataclass(frozen=True)
class Job:
    """A piece of work; jobs run one after another."""

    part: str
    """The chapter that it is for."""
    label: str
    """What it does, for people."""
    work: float
    """About how many seconds it takes on 2 fast cores; only the ratios between jobs matter."""
    run: Callable[[], object]


class Case(Protocol):
    """The tensors that all variants share."""

    def run(self, variant: str) -> None:
        """One run of a variant; leaves no gradients."""


@dataclass
class Turns:
    """Variants of one case: each runs once with its memory counted, then they are timed in turn."""

    part: str
    label: str
    """Both for the progress bar."""
    rows: list[Row]
    """A row for each variant, to be filled. If its ``predicted_bytes`` exceed the free memory, the
    variant does not run and the row's note says so."""
    make: Callable[[], Case]
    """Builds the case when the first job runs; it lives until the last job is dropped."""

    def jobs(self) -> list[Job]:
        """The jobs that fill the rows."""
        case = cache(self.make)

        def job(row: Row, what: str, fill: Callable) -> Job:
            label = f"{self.label}, {row.variant}: {what}"
            return Job(self.part, label, row.work, partial(fill, row, case))

        jobs = [job(row, "memory", _count) for row in self.rows]
        for number in range(max(row.rounds for row in self.rows)):
            jobs += [job(row, "time", _time) for row in self.rows if number < row.rounds]
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


class Progress:
    """Runs jobs and shows their progress: a bar on a terminal, elsewhere a line for each job."""

    def __init__(self, terminal: bool | None = None):
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self.seconds: dict[str, float] = {}
        """Wall time of each part."""
        self._done = self._left = 0.0
        self._began = self._job_began = time.perf_counter()

    def run(self, jobs: list[Job]) -> None:
        """Runs the jobs in order; drops each one afterwards, with everything that it holds."""
        self._left = sum(job.work for job in jobs)
        bar = self._bar() if self.terminal else None
        try:
            while jobs:
                job = jobs.pop(0)
                self._job_began = time.perf_counter()
                if bar is None:
                    print(f"{self.left():>12}  {job.part}: {job.label}", flush=True)
                else:
                    bar.update(0, total=self._done + self._left, completed=self._done,
                               now=f"{job.part}: {job.label}")  # fmt: skip
                self._run(job)
        finally:
            if bar is not None:
                bar.stop()

    def _run(self, job: Job) -> None:
        try:
            job.run()
        finally:
            took = time.perf_counter() - self._job_began
            self.seconds[job.part] = self.seconds.get(job.part, 0.0) + took
        self._done, self._left = self._done + job.work, self._left - job.work

    def left(self) -> str:
        """The time left, at the speed of the work done so far."""
        now = time.perf_counter()
        speed = (self._job_began - self._began + PRIOR) / (self._done + PRIOR)
        seconds = max(0.0, speed * self._left - (now - self._job_began))
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} left"

    def _bar(self):
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        from deepfast.measure.console import LiveColumn

        columns = BarColumn(bar_width=20), LiveColumn(self.left)
        bar = Bar(*columns, TextColumn("{task.fields[now]}", markup=False))
        bar.add_task("", now="")
        bar.start()
        return bar
