"""The jobs of a report, and a bar that shows the current job and the time left."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

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
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        progress = self

        class Left(ProgressColumn):
            """The time left, computed whenever the bar is drawn."""

            def render(self, task) -> Text:
                return Text(progress.left())

        bar = Bar(BarColumn(bar_width=20), Left(), TextColumn("{task.fields[now]}", markup=False))
        bar.add_task("", now="")
        bar.start()
        return bar
