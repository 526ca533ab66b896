"""The jobs of a report, and a bar that shows the current one."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from deepfast.clock import on_cpu
from deepfast.measure.clock import Row
from deepfast.measure.machine import ResidentPeak, free_bytes
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
    label: str
    """Both for the progress bar."""
    rows: list[Row]
    """A row for each variant, to be filled. If its ``predicted_bytes`` exceed the free memory, the
    variant does not run and the row's note says so."""
    make: Callable[[], Any]
    """Builds what the variants share when the first job runs; it lives until the last job is
    dropped. Its method ``run`` takes a variant's name and leaves no gradients."""

    def jobs(self) -> list[Job]:
        """The jobs that fill the rows."""
        case = cache(self.make)

        def job(row: Row, what: str, fill: Callable) -> Job:
            label = f"{self.label}, {row.variant}: {what}"
            return Job(self.part, label, partial(fill, row, case))

        jobs = [job(row, "memory", _count) for row in self.rows]
        for number in range(max(row.rounds for row in self.rows)):
            jobs += [job(row, "time", _time) for row in self.rows if number < row.rounds]
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
    run = partial(case().run, row.variant)
    with ResidentPeak() as resident, LiveBytes() as live:
        run()
    row.peak_bytes, row.resident_bytes = live.peak, resident.nbytes


def _time(row: Row, case: Callable[[], Any]) -> None:
    if row.peak_bytes is not None:
        row.seconds.append(on_cpu(partial(case().run, row.variant)))


class Progress:
    """Runs jobs and tells the current one: in a bar on a terminal, elsewhere in a line for each."""

    def __init__(self, terminal: bool | None = None):
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self.seconds: dict[str, float] = {}
        """Wall time of each part."""

    def run(self, jobs: list[Job]) -> None:
        """Runs the jobs in order; drops each one afterwards, with everything that it holds."""
        count = len(jobs)
        with self._shown(count) as tell:
            while jobs:
                job = jobs.pop(0)
                tell(count - len(jobs), f"{job.part}: {job.label}")
                self._run(job)

    def _run(self, job: Job) -> None:
        began = time.perf_counter()
        try:
            job.run()
        finally:
            took = time.perf_counter() - began
            self.seconds[job.part] = self.seconds.get(job.part, 0.0) + took

    @contextlib.contextmanager
    def _shown(self, count: int) -> Iterator[Callable[[int, str], None]]:
        """A function that tells the number of the current job and what it does."""
        if not self.terminal:
            yield lambda number, now: print(f"{number:>4} of {count}  {now}", flush=True)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()
        with Bar(*columns, TextColumn("{task.fields[now]}", markup=False)) as bar:
            task = bar.add_task("", total=count, now="")
            yield lambda number, now: bar.update(task, completed=number, now=now)
