"""The stages of a sweep: the plan, the pilots, and the runs with the values that these chose."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deepfast.memory.units import format_bytes
from deepfast.mt.sweep.grid import Pilots, Point, best
from deepfast.mt.sweep.runs import Result, Run, make_runs, some
from deepfast.mt.training import Recipe, RecipeError, load_recipe

DECIDED = {"train.seed": "--seeds", "output": "--output", "resume": "--output"}
"""Keys that a sweep sets itself, and the option that decides them."""
MEASURED = 20
"""Steps of every point that a plan measures."""
SHORT = 10
"""Runs of fewer than this many times the measured steps are not worth a measurement."""

Results = dict[Point, list[Result]]
"""The results of the runs of each point."""
Tried = dict[Point, dict[Point, Result]]
"""The results of the pilots of each point."""


class Sweep:
    """The runs of all points.

    A run translates the test part, if there is one, unless an override says otherwise.

    Args:
        recipe: a file, or the name of a shipped recipe.
        overrides: of all runs.
        points: the first is the baseline.
        output: a folder; None: the recipe's output with "-sweep" at its end.

    Raises:
        RecipeError: a value or an override that a recipe refuses; or nothing to validate or test.
    """

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        points: Sequence[Point],
        pilots: Pilots | None = None,
        output: Path | None = None,
    ):
        given = {text.partition("=")[0].strip() for text in overrides}
        swept = {key for point in points for each in (point, *point.pilots) for key in each.keys}
        sets = DECIDED | dict.fromkeys(given & swept, "--over or sweep.pilots")
        for key in sets.keys() & (given | swept):
            raise RecipeError(f"{key}: expected no value here, got one: {sets[key]} decides it")
        self.recipe, self.overrides, self.points = recipe, overrides, points
        self.folder = output or Path(f"{load_recipe(recipe, overrides).output}-sweep")
        # What a recipe refuses is refused here, before anything runs.
        self._first = {point: self.run(point, 1) for point in points}
        self.pilots = {
            point: {pilot: self._pilot(point, pilot, pilots.steps) for pilot in point.pilots}
            for point in points
        }
        """The short runs that choose a value for each point."""

    def run(self, point: Point, seed: int, more: Iterable[str] = (), under: str = "") -> Run:
        """A run of a point, with more overrides, in a folder under that of the sweep."""
        given = [*self.overrides, *point.overrides]
        data = load_recipe(self.recipe, given).data
        if not (data.validates or data.tests):
            raise RecipeError(
                f"{self.recipe}: expected dev or test pairs to compare runs by, got neither"
            )
        # In front of the overrides, which may say no.
        test = ["train.test_bleu=true"] * data.tests
        folder = self.folder / under / point.folder / f"seed-{seed}"
        own = [f"train.seed={seed}", f"output={json.dumps(str(folder))}", "resume=true"]
        return Run(point.name, load_recipe(self.recipe, [*test, *given, *more, *own]))

    def _pilot(self, point: Point, pilot: Point, steps: int) -> Run:
        few = _few(self._first[point].recipe, steps)
        return self.run(pilot, 1, [*few, "train.test_bleu=false"], "pilots")

    def _trial(self, point: Point) -> Run:
        """The first steps of a run, without what comes after them."""
        every = (f"train.{key}={MEASURED}" for key in ("log_every", "validate_every", "save_every"))
        off = ("train.average_last=0", "train.test_bleu=false", "train.validate_bleu=false")
        more = [*_few(self._first[point].recipe, MEASURED), *every, *off]
        # Other settings have another folder, so the steps that a plan finds there are its own.
        settings = json.dumps(self.run(point, 1, more).settings(), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return self.run(point, 1, more, f"plan/{digest}")

    def tried(self, point: Point) -> dict[Point, Result]:
        """The results of a point's pilots so far."""
        found = {pilot: run.result() for pilot, run in self.pilots[point].items()}
        return {pilot: result for pilot, result in found.items() if result is not None}

    def runs(self, point: Point) -> list[Run]:
        """The runs of a point, with the value that its pilots chose so far, or their first one."""
        if point.pilots:
            chosen = best(self.tried(point)) or point.pilots[0]
            point = replace(point, own=(*point.own, "=".join(chosen.changes[-1])))
        return [self.run(point, seed) for seed in range(1, point.seeds + 1)]

    def plan(self, only: Sequence[Point], jobs: int) -> str | None:
        """Measures a few steps of every point that has runs to make, and says what these runs take;
        None where no run is left, or where all are short. The measurements stay in the folder, so a
        second plan has them."""
        all_runs = {point: [*self.pilots[point].values(), *self.runs(point)] for point in only}
        left = {
            point: {run: steps_of(run.recipe) for run in own if run.result() is None}
            for point, own in all_runs.items()
        }
        left = {point: own for point, own in left.items() if own}
        counts = [count for own in left.values() for count in own.values()]
        if all(count <= SHORT * MEASURED for count in counts):
            return None
        trials = {point: self._trial(point) for point in left}
        make_runs(trials.values(), jobs)
        lengths = []
        for point, own in left.items():
            step = trials[point].result().get("step_seconds") or math.inf
            for run, count in own.items():
                limit = 60 * (run.recipe.train.max_minutes or math.inf)
                lengths.append(min(limit, step * count))
        # The longest run is as long with any number of processes.
        hours = max(sum(lengths) / jobs, *lengths) / 3600
        took = f"about {hours:.1f} hours" if hours < math.inf else "an unknown time"
        peak = max(trial.result().get("peak_bytes", 0) for trial in trials.values())
        total = sum(filter(math.isfinite, counts))
        return (
            f"plan: {some(len(counts), 'run')} of {some(len(left), 'point')}, {total:,} steps; "
            f"{took} with {some(jobs, 'process', 'es')}, by {MEASURED} measured steps of each "
            f"point, without translation; at most {format_bytes(peak)} in a process"
        )

    def make(
        self, only: Sequence[Point], jobs: int, write: Callable[[Results, Tried], None]
    ) -> bool:
        """Makes the pilots and then the runs of some points; returns whether none failed.

        A point with a pilot that failed starts no run: the pilot may still win.

        Args:
            jobs: processes at once; 0: no run is made, and only finished ones have results.
            write: called with the results so far of all points, first with those that were there.
        """
        make_runs([run for point in only for run in self.pilots[point].values()], jobs)
        tried = {point: self.tried(point) for point in self.points}
        runs = {point: self.runs(point) for point in self.points}
        ready = [p for p in only if not any("failed" in found for found in tried[p].values())]
        for point in ready:
            if tried[point] and best(tried[point]) is None:
                first = point.pilots[0].name
                print(f"{point.name}: no pilot has a dev NLL, its runs are as {first}", flush=True)

        def so_far() -> Results:
            found = {p: [r for run in own if (r := run.result())] for p, own in runs.items()}
            return {point: own for point, own in found.items() if own}

        if so_far():
            write(so_far(), tried)
        made = [run for point in ready for run in runs[point]]
        make_runs(made, jobs, lambda: write(so_far(), tried))
        found = [*(own.values() for own in tried.values()), *so_far().values()]
        return not any("failed" in result for own in found for result in own)


def _few(recipe: Recipe, steps: int) -> list[str]:
    """Overrides for so many steps, of each run of a model that grows."""
    few = f"{{max_steps: {steps}, max_minutes: null, patience: null}}"
    return [f"{part}={few}" for part in (["train", "grow.train"] if _grows(recipe) else ["train"])]


def _grows(recipe: Recipe) -> bool:
    """Whether a recipe has a run that puts layers on top of another one."""
    return recipe.grow is not None and recipe.model.get("kind") != "depth_growing"


def steps_of(recipe: Recipe) -> float:
    """How many steps a run takes at most; infinity where only time or patience ends it."""
    counts = [recipe.train.max_steps]
    if _grows(recipe):
        # One that grows on a checkpoint has no first run.
        counts = [] if recipe.grow.get("from") else counts
        counts.append((recipe.grow.get("train") or {}).get("max_steps", recipe.train.max_steps))
    return math.inf if None in counts else sum(counts)
