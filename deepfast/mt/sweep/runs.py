"""Runs in processes of their own: `deepfast mt train`, several at once, resumed, each made once.

The folder of a run holds its whole recipe, `recipe.yaml`, what the run prints, `log.txt`, and what
`deepfast mt train` writes. The run has finished when `result.json` is there.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from deepfast.files import make_folder, write_atomically
from deepfast.mt.sweep.grid import Point
from deepfast.mt.training import Recipe, dump_recipe, load_recipe
from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.recipe_file import differences
from deepfast.mt.training.report import RESULT

RECIPE, LOG = "recipe.yaml", "log.txt"
TRAIN = (sys.executable, "-m", "deepfast", "mt", "train")
POLL = 0.05
"""Seconds between two looks at the processes."""

Result = dict[str, Any]
"""A run's `result.json` with its seed and its best dev NLL; or the seed and why the run has
``failed``."""


class Run:
    """One run of a point. Its recipe's output is its folder, in which it resumes.

    Raises:
        ValueError: the folder holds a run with other settings.
    """

    def __init__(self, point: Point, recipe: Recipe):
        self.point, self.recipe = point, recipe
        self.folder, self.seed = Path(recipe.output), recipe.train.seed
        self.found: Result | None = None
        """What the run found, or why it failed; None if it has not ended."""
        if (self.folder / RECIPE).exists():
            changes = differences(_settings(load_recipe(self.folder / RECIPE)), _settings(recipe))
            if changes:
                raise ValueError(
                    f"{self.folder}: expected a run with the same settings, got other settings "
                    f"({', '.join(changes[:3])}); choose another folder with --output, or remove it"
                )
            self.found = read_result(self.folder, self.seed)

    @property
    def failed(self) -> bool:
        return "failed" in (self.found or {})

    @property
    def nll(self) -> float:
        """The dev NLL; infinity for a run without any."""
        found = (self.found or {}).get("nll")
        return math.inf if found is None else found

    def start(self, environment: dict[str, str]) -> subprocess.Popen:
        """Starts the process, with these variables of the environment."""
        make_folder(self.folder)
        write_atomically(self.folder / RECIPE, dump_recipe(self.recipe).encode())
        with open(self.folder / LOG, "a", encoding="utf-8") as log:
            # In a group of its own: Ctrl-C on the terminal reaches it once, from here. A second one
            # would end it before it has saved.
            return subprocess.Popen(
                [*TRAIN, str(self.folder / RECIPE)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                process_group=0,
            )

    def ended(self, code: int) -> None:
        """Prints what the run found, or why it failed, after its process has ended."""
        self.found = read_result(self.folder, self.seed)
        if self.found is None:
            lines = (self.folder / LOG).read_text("utf-8", "replace").strip().splitlines()
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
            last = lines[-1].removeprefix("deepfast mt train: ") if lines else "no output"
            self.found = {"seed": self.seed, "failed": f"{why}: {last}"}
        print(f"{self.point.name}, seed {self.seed}: {in_words(self.found)}", flush=True)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, without places."""
    plain = recipe.to_dict() | {"output": None, "resume": None}
    return plain | {"data": plain["data"] | {"cache": None}}


def read_result(folder: Path, seed: int) -> Result | None:
    """What a run found; None if it has not finished."""
    path = folder / RESULT
    if not path.exists():
        return None
    found = {"seed": seed} | json.loads(path.read_text("utf-8"))
    values = [found[key] for key in ("best_nll", "average_nll") if found.get(key) is not None]
    return found | {"nll": min(values, default=None)}


def in_words(found: Result) -> str:
    """A result as one line."""
    for why in ("failed", "diverged"):
        if why in found:
            return f"{why}, {found[why]}"
    names = {"test_bleu": "BLEU", "nll": "dev NLL"}
    numbers = (f"{names[key]} {found[key]:.4g}" for key in names if found[key] is not None)
    return ", ".join(numbers)


def make_runs(runs: Iterable[Run], jobs: int, each: Callable[[], None] = lambda: None) -> None:
    """Makes the runs that have not ended, and prints a line for each.

    Ctrl-C and SIGTERM stop the processes, which write checkpoints first; the next call resumes
    them. A second Ctrl-C and an error kill them.

    Args:
        jobs: processes at once. They share the cores, and the GPUs of a machine in turn. 0: no run
            is made.
        each: called after each run.

    Raises:
        KeyboardInterrupt: after the processes have ended.
    """
    # Every point has run once before any runs twice, so an interrupted table has all lines.
    waiting = sorted((run for run in runs if run.found is None), key=lambda run: run.seed)
    active: dict[int, tuple[Run, subprocess.Popen]] = {}
    with StopSignal() as signalled:
        try:
            while jobs and (waiting or active):
                for job in range(jobs):
                    if waiting and job not in active:
                        run = waiting.pop(0)
                        active[job] = run, run.start(environment(run, job, jobs))
                time.sleep(POLL)
                if signalled.name:
                    raise KeyboardInterrupt
                for job, (run, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[job]
                        run.ended(process.returncode)
                        each()
        except KeyboardInterrupt:
            text = f"interrupted: {len(active)} active will save and end; Ctrl-C again kills"
            print(text, file=sys.stderr, flush=True)
            for _, process in active.values():
                process.terminate()
            for _, process in active.values():
                process.wait()
            raise
        finally:
            for _, process in active.values():
                process.kill()
                process.wait()


def environment(run: Run, job: int, jobs: int) -> dict[str, str]:
    """The variables that give one of several jobs its part of the cores, and its GPU."""
    found, count = {}, torch.cuda.device_count()
    if jobs > 1:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    # A device with a number, such as cuda:1, is the user's choice.
    if count > 1 and run.recipe.train.device in (None, "cuda"):
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        found["CUDA_VISIBLE_DEVICES"] = given.split(",")[job % count]
    return found
