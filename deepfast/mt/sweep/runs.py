"""Runs in processes of their own: `deepfast mt train`, several at once, resumed, each made once.

The folder of a run holds its whole recipe, `recipe.yaml`, what the run prints, `log.txt`, and what
`deepfast mt train` writes. The run has finished when `result.json` is there.
"""

from __future__ import annotations

import json
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
from deepfast.mt.training import Recipe, dump_recipe, load_recipe
from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.recipe_file import differences
from deepfast.mt.training.report import RESULT, read_metrics

RECIPE, LOG = "recipe.yaml", "log.txt"
TRAIN = (sys.executable, "-m", "deepfast", "mt", "train")
POLL = 0.05
"""Seconds between two looks at the processes."""

Result = dict[str, Any]
"""A run's `result.json` with its seed, the curve of dev NLL and its best dev NLL; or the seed and
why the run has ``failed``."""


class Run:
    """One run of a sweep.

    Args:
        name: what people read, such as "model.encoder_layers=6".
        recipe: its output is the folder of this run, in which it resumes.
    """

    def __init__(self, name: str, recipe: Recipe):
        self.name, self.recipe = name, recipe
        self.folder, self.seed = Path(recipe.output), recipe.train.seed
        self._found: Result | None = None

    def settings(self) -> dict[str, Any]:
        """The recipe as plain values, without places."""
        plain = self.recipe.to_dict()
        plain["data"].pop("cache")
        return {key: value for key, value in plain.items() if key not in ("output", "resume")}

    def result(self) -> Result | None:
        """What the run found, or why it failed; None if it has not ended.

        Raises:
            ValueError: the folder holds a run with other settings.
        """
        path = self.folder / RECIPE
        if self._found is None and path.exists():
            other = differences(Run(self.name, load_recipe(path)).settings(), self.settings())
            if other:
                raise ValueError(
                    f"{self.folder}: expected a run with the same settings, got other settings "
                    f"({', '.join(other[:3])}); choose another folder with --output, or remove it"
                )
            self._found = read_result(self.folder, self.seed)
        return self._found

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
        found = read_result(self.folder, self.seed)
        if found is None:
            lines = (self.folder / LOG).read_text("utf-8", "replace").strip().splitlines()
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
            last = lines[-1].removeprefix("deepfast mt train: ") if lines else "no output"
            found = {"seed": self.seed, "failed": f"{why}: {last}"}
        self._found = found
        print(f"{self.name}, seed {self.seed}: {in_words(found)}", flush=True)


def read_result(folder: Path, seed: int) -> Result | None:
    """What a run found; None if it has not finished."""
    path = folder / RESULT
    if not path.exists():
        return None
    found = {"seed": seed} | json.loads(path.read_text("utf-8"))
    if "diverged" in found:
        return found
    curve, steps, seconds = [], 0, 0.0
    # A model that grows has a folder for each of its two runs.
    for stage in sorted(folder.glob("stage?")) or [folder]:
        rows = read_metrics(stage)
        curve += [[steps + row["step"], row["nll"]] for row in rows if row["event"] == "valid"]
        steps += rows[-1]["step"]
        seconds += rows[-1]["seconds"]
    values = [found[key] for key in ("best_nll", "average_nll") if found[key] is not None]
    return found | {"curve": curve, "seconds": seconds, "nll": min(values, default=None)}


def in_words(found: Result) -> str:
    """A result as one line."""
    for why in ("failed", "diverged"):
        if why in found:
            return f"{why}, {found[why]}"
    parts = [f"BLEU {found['test_bleu']:.1f}"] if found["test_bleu"] is not None else []
    parts += [f"dev NLL {found['nll']:.3f}"] if found["nll"] is not None else []
    return ", ".join([*parts, f"{found['seconds']:.0f} s"])


def make_runs(runs: Iterable[Run], jobs: int, each: Callable[[], None] = lambda: None) -> None:
    """Makes the runs that have not ended, and prints a line for each.

    Ctrl-C and SIGTERM stop the processes, which write checkpoints first; the next call resumes
    them. A second Ctrl-C and an error kill them.

    Args:
        jobs: processes at once. They share the cores, and the GPUs of a machine in turn. 0: no run
            is made.
        each: called after each run.

    Raises:
        ValueError: a folder holds a run with other settings. Then nothing is started.
        KeyboardInterrupt: after the processes have ended.
    """
    # Every point has run once before any runs twice, so an interrupted table has all lines.
    waiting = sorted((run for run in runs if run.result() is None), key=lambda run: run.seed)
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
            text = f"interrupted: {some(len(active), 'run')} will save and end; Ctrl-C again kills"
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
    found = {}
    if jobs > 1:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    given, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    # A device with a number, such as cuda:1, is the user's choice.
    if count > 1 and run.recipe.train.device in (None, "cuda"):
        names = given.split(",")[:count] if given else [*map(str, range(count))]
        found["CUDA_VISIBLE_DEVICES"] = names[job % count]
    return found


def some(count: int, noun: str, more: str = "s") -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{more * (count != 1)}"
