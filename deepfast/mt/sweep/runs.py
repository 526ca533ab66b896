"""Runs in processes of their own: several at once, resumed, each made once.

A run has a folder: `settings.json` is its recipe, `run` what `deepfast mt train` writes, `log.txt`
what it printed, and `result.json` its result once it has finished.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepfast.files import make_folder, write_atomically
from deepfast.memory.units import format_bytes
from deepfast.mt.models import build
from deepfast.mt.training import Recipe, load_recipe, recipe_from_dict
from deepfast.mt.training.environment import heeded
from deepfast.mt.training.recipe_file import differences

RESULT, SETTINGS, LOG = "result.json", "settings.json", "log.txt"
INTERRUPTED = 130
"""The exit code of a run that was stopped and can be resumed."""
PROCESS = (sys.executable, "-m", "deepfast.mt.sweep.one")
POLL = 0.05
"""Seconds between two looks at the processes."""
SHOWN = 3
"""How many of the settings that differ an error names."""
EVERY = 5
"""Seconds at least between two writings of a comparison before its end."""

Result = dict[str, Any]
Line = TypeVar("Line")


@dataclass(frozen=True, eq=False)
class Run:
    """One run: a recipe with its seed, and its folder."""

    name: str
    """What people read, such as "model.encoder_layers=6"."""
    recipe: Recipe
    folder: Path

    @property
    def seed(self) -> int:
        return self.recipe.train.seed

    @cached_property
    def parameters(self) -> int:
        """About how many parameters its model has; a size to compare runs by."""
        with torch.device("meta"):
            model = build(self.recipe.model_config(vocab_size=self.recipe.data.vocab_size))
        return sum(p.numel() for p in model.parameters())

    def settings(self) -> dict[str, Any]:
        """The recipe as JSON has it, without what the folder decides."""
        return _without_place(self.recipe.to_dict())

    def result(self) -> Result | None:
        """What the run found; None if it has not finished.

        Raises:
            ValueError: the folder holds a run with other settings.
        """
        path = self.folder / SETTINGS
        if path.exists():
            other = differences(self.completed(read_object(path)), self.settings())
            more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
            got = f"other settings ({', '.join(other[:SHOWN])}{more})" if other else None
        else:
            got = f"a result without {SETTINGS}" if (self.folder / RESULT).exists() else None
        if got is not None:
            raise ValueError(
                f"{self.folder}: expected a run with the same settings, got {got}; choose another "
                "folder with --output, or remove it"
            )
        return self._found() if (self.folder / RESULT).exists() else None

    @staticmethod
    def completed(plain: dict[str, Any]) -> dict[str, Any]:
        """Settings that were read, with the keys that are newer than their file."""
        return _without_place(recipe_from_dict(plain).to_dict())

    def _found(self) -> Result:
        path = self.folder / RESULT
        found = read_object(path, seed=int, process_bytes=int)
        if "diverged" in found:
            return found
        found = read_object(path, steps=int, parameters=int, curve=list, seconds=(int, float))
        return {"nll": None, "bleu": None} | found

    def write(self) -> None:
        """Makes the folder, with the recipe for the process."""
        make_folder(self.folder)
        text = json.dumps(self.settings(), indent=1)
        write_atomically(self.folder / SETTINGS, text.encode())

    def ended(self, code: int) -> Result:
        """The result of a process that has ended; ``failed`` says why there is none."""
        if code == 0:
            return self._found()
        lines = (self.folder / LOG).read_text("utf-8", "replace").strip().splitlines()
        why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return {"seed": self.seed, "failed": f"{why}: {lines[-1] if lines else 'no output'}"}


def _without_place(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key not in ("output", "resume")}


def read_object(path: Path, **keys: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON object in a file of a sweep, which has these keys with values of these types.

    Raises:
        ValueError: other content, or it cannot be read.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        content = None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    fits = isinstance(content, dict) and all(
        isinstance(content.get(key), kind) for key, kind in keys.items()
    )
    if not fits:
        raise ValueError(
            f"{path}: expected what deepfast mt sweep writes, got other content; choose another "
            "folder with --output, or remove it"
        )
    return content


def write_result(folder: Path, found: Result) -> None:
    """A line for each key."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    write_atomically(folder / RESULT, f"{{\n{lines}\n}}\n".encode())


def read_recipe(folder: Path) -> Recipe:
    """The recipe that `Run.write` wrote; it resumes in this folder."""
    plain = read_object(folder / SETTINGS, data=dict)
    return replace(recipe_from_dict(plain), output=str(folder / "run"), resume=True)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Processes:
    """The processes that make runs."""

    jobs: int = 1
    """How many at once; 0: no run is started, and only finished ones have results."""
    threads: int | None = None
    """Of each; None: all cores for one job, else each job's part of them."""
    memory: int | None = None
    """Bytes that they may take together. A run counts as much as the largest peak of a finished
    run with as many parameters or more; where there is none, it runs alone. So the run with the
    most parameters begins."""


def seeded(name: str, recipe: str, overrides: Sequence[str], seeds: int, folder: Path) -> list[Run]:
    """A run of a recipe for each seed from 1, in folders of ``folder``.

    Raises:
        RecipeError: what a recipe refuses.
    """
    return [
        Run(name, load_recipe(recipe, [*overrides, f"train.seed={seed}"]), folder / f"seed-{seed}")
        for seed in range(1, seeds + 1)
    ]


def compare(
    lines: Mapping[Line, Sequence[Run]],
    processes: Processes,
    write: Callable[[dict[Line, dict[Run, Result]]], None] | None = None,
) -> dict[Line, dict[Run, Result]]:
    """Makes the runs of every line of a table, prints a line for each, and returns their results.

    Every line has run once before any runs twice, so an interrupted table has all lines.

    Args:
        write: called with the results so far, every few seconds and at the end, also after an
            interrupt.
    """
    done: dict[Run, Result] = {}
    written = time.monotonic()

    def so_far() -> dict[Line, dict[Run, Result]]:
        return {
            line: {run: done[run] for run in runs if run in done} for line, runs in lines.items()
        }

    def report(run: Run, found: Result) -> None:
        nonlocal written
        done[run] = found
        print(f"{run.name}, seed {run.seed}: {in_words(found)}", flush=True)
        # Drawing takes about a second, and many results may have been there before.
        if write is not None and time.monotonic() > written + EVERY:
            write(so_far())
            written = time.monotonic()

    try:
        turns = zip_longest(*lines.values())
        run_all([run for turn in turns for run in turn if run], report, processes)
    finally:
        if write is not None and done:
            write(so_far())
    return so_far()


def some(count: int, noun: str, more: str = "s") -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{more * (count != 1)}"


def in_words(found: Result) -> str:
    """A result as one line."""
    for why in ("failed", "diverged"):
        if why in found:
            return f"{why}, {found[why]}"
    parts = [f"BLEU {found['bleu']:.1f}"] if found["bleu"] is not None else []
    parts += [f"dev NLL {found['nll']:.3f}"] if found["nll"] is not None else []
    return ", ".join([*parts, f"{found['seconds']:.0f} s"])


def run_all(
    runs: Sequence[Run], report: Callable[[Run, Result], None], processes: Processes
) -> None:
    """Makes all runs that have not finished, and hands each result over as soon as it is known.

    A run that fails has a result with ``failed``, and is made again by the next call. Ctrl-C and
    SIGTERM stop the processes, which write checkpoints first; the next call resumes them.

    Args:
        report: called with each run and its result, finished ones first.

    Raises:
        ValueError: a folder holds a run with other settings. Then nothing is started.
        KeyboardInterrupt: after the processes have ended.
    """
    jobs, threads, memory = processes.jobs, processes.threads, processes.memory
    results = {run: run.result() for run in runs}
    active: dict[Run, subprocess.Popen] = {}

    def expected(run: Run) -> int | None:
        """The memory that a run will take at most; None if no run has finished."""
        peaks = [
            found["process_bytes"]
            for other, found in results.items()
            if found and "process_bytes" in found and other.parameters >= run.parameters
        ]
        return max(peaks, default=None)

    def fits(run: Run) -> bool:
        """Whether a run may start next to the active ones."""
        if memory is None:
            return True
        needed = [expected(each) for each in (run, *active)]
        return not active if None in needed else sum(needed) <= memory

    for run, found in results.items():
        if found is not None:
            report(run, found)
    waiting = [run for run, found in results.items() if found is None] if jobs else []
    if memory is not None:
        waiting.sort(key=lambda run: -run.parameters)
    if threads is None and jobs > 1:
        threads = max(1, cores() // jobs)
    with _ending(active):
        while waiting or active:
            while waiting and len(active) < jobs and fits(waiting[0]):
                run = waiting.pop(0)
                active[run] = _start(run, threads)
            if waiting and not active:
                run = waiting.pop(0)
                took = format_bytes(expected(run))
                got = f"not started: a run took {took}, more than {format_bytes(memory)}"
                report(run, {"seed": run.seed, "failed": got})
                continue
            time.sleep(POLL)
            for run, code in [(run, process.poll()) for run, process in active.items()]:
                if code is not None:
                    del active[run]
                    results[run] = run.ended(code)
                    report(run, results[run])


def _start(run: Run, threads: int | None) -> subprocess.Popen:
    run.write()
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with open(run.folder / LOG, "a", encoding="utf-8") as log:
        # In a group of its own: Ctrl-C on the terminal reaches it once, from here. A second one
        # would end it before it has saved.
        return subprocess.Popen(
            [*PROCESS, str(run.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )


@contextmanager
def _ending(active: dict[Run, subprocess.Popen]):
    """Ends the processes with the block: on Ctrl-C or SIGTERM they save first, on a second Ctrl-C
    and on an error they are killed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, interrupt) for number in heeded("SIGTERM", "SIGHUP") if main
    }
    try:
        yield
    except KeyboardInterrupt:
        if active:
            runs = some(len(active), "run")
            print(
                f"interrupted: {runs} will save and end; Ctrl-C again kills",
                file=sys.stderr,
                flush=True,
            )
        for process in active.values():
            process.terminate()
        for process in active.values():
            process.wait()
        raise
    finally:
        for process in active.values():
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
