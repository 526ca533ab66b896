"""Runs processes with journals, see `bench.gpu.journal`, and starts crashed ones again."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu import journal

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Task:
    """A command whose process writes a journal."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


class _Process:
    """The process of a task; after a crash a second one, and so on."""

    def __init__(self, task: Task, folder: Path, environment: dict[str, str]):
        self.task, self.said, self.read = task, folder / "output", 0
        self.journal = folder / "journal"
        self.environment = environment | task.environment | {journal.VARIABLE: str(self.journal)}
        self.finished = False
        self.start()

    def start(self) -> None:
        self.current, self.ended, self.since = None, 0, time.perf_counter()
        with self.said.open("w") as output:
            # A group of its own, so that a stop reaches the processes that it started.
            self.process = subprocess.Popen(
                self.task.command, cwd=ROOT, env=self.environment, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip

    def events(self) -> list[dict]:
        found, self.read = journal.read(self.journal, self.read)
        for event in found:
            if "begin" in event:
                self.current, self.since = event["begin"], time.perf_counter()
            elif "end" in event:
                self.current, self.ended = None, self.ended + 1
                self.since = time.perf_counter()
            self.finished |= "finished" in event
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close_item(self, outcome: str, text: str) -> dict:
        """Ends the item that a stopped process was at; the next process goes on after it."""
        seconds = round(time.perf_counter() - self.since, 2)
        event = {"end": self.current, "outcome": outcome, "seconds": seconds, "text": text}
        with self.journal.open("a") as file:
            # A process that was killed may have left half a line.
            file.write("\n" + journal.line(event))
            self.read = file.tell()
        return event

    def output(self) -> str:
        return self.said.read_text(errors="replace")


def run(
    tasks: list[Task],
    take: Callable[[Task, dict], None],
    *,
    seconds: float,
    item_seconds: Callable[[str], float],
    environment: dict[str, str],
    tick: Callable[[], None] = lambda: None,
) -> list[str]:
    """Runs all tasks at once until they end or ``seconds`` have passed.

    An item that a process crashed at has the outcome "crashed", one that took longer than its
    ``item_seconds`` the outcome "stopped".

    Args:
        take: called with each event of a journal, and where a process ends with its exit status and
            what it printed: ``{"exit": 0, "output": ...}``.
        tick: called several times a second.

    Returns:
        A sentence for each task that did not reach its end.
    """
    end, problems = time.perf_counter() + seconds, []
    with tempfile.TemporaryDirectory() as folder:
        waiting = []
        for number, task in enumerate(tasks):
            own = Path(folder, str(number))
            own.mkdir()
            waiting.append(_Process(task, own, environment))
        started = list(waiting)
        try:
            while waiting:
                time.sleep(0.1)
                over = time.perf_counter() > end
                for process in list(waiting):
                    problem = _look(process, take, item_seconds, over)
                    if problem is not None:
                        waiting.remove(process)
                        problems += [f"{process.task.name}: {problem}"] * bool(problem)
                tick()
        finally:
            for process in started:
                process.stop()
    return problems


def _look(process: _Process, take, item_seconds, over: bool) -> str | None:
    """Takes what is new; None while the process runs, then "" or why its task did not end."""
    ran_out = process.process.poll()
    for event in process.events():
        take(process.task, event)
    if ran_out is None and over:
        process.stop()
        if process.current is not None:
            take(process.task, process.close_item("stopped", "out of time"))
        return "stopped: out of time"
    if ran_out is None:
        late = time.perf_counter() - process.since
        if process.current is None or late < item_seconds(process.current):
            return None
        process.stop()
        take(process.task, process.close_item("stopped", f"stopped after {late:.0f} s"))
    else:
        output = process.output()
        take(process.task, {"exit": ran_out, "output": output})
        text = f"exit status {ran_out}\n{output[-4000:]}"
        if process.finished:
            return ""
        if process.current is not None:
            take(process.task, process.close_item("crashed", text))
        elif not process.ended:
            return text
    process.start()
    return None
