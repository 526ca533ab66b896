"""The stages of a sweep: the plan, the pilots, and the runs with the values that these chose."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from deepfast.memory.units import format_bytes
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Result, Run, make_runs
from deepfast.mt.training import Recipe, RecipeError, load_recipe
from deepfast.mt.training.growing import runs as stages_of

DECIDED = {"train.seed": "--seeds", "output": "--output", "resume": "--output"}
"""Keys that a sweep sets itself, and the option that decides them."""
MEASURED = 20
"""Steps of every point that a plan measures."""
SHORT = 10
"""Runs of at most this many times the measured steps are not worth a measurement."""

Results = Mapping[Point, Sequence[Result]]
"""The results of the runs of each point."""


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
        ValueError: a folder holds a run with other settings.
    """

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        points: Sequence[Point],
        output: Path | None = None,
    ):
        for text in (*overrides, *(text for point in points for text in point.overrides)):
            key = text.partition("=")[0].strip()
            if key in DECIDED:
                raise RecipeError(f"{key}: expected no value, got one: {DECIDED[key]} decides it")
        plain = load_recipe(recipe, overrides)
        if not (plain.data.validates or plain.data.tests):
            raise RecipeError(f"{recipe}: expected dev or test pairs to compare by, got neither")
        if any(point.pilots for point in points) and not plain.data.validates:
            raise RecipeError("sweep.pilots: expected dev pairs, by which they choose, got none")
        folders = [point.folder for point in points]
        for name in {folder for folder in folders if folders.count(folder) > 1}:
            raise RecipeError(f"{name}: expected a folder for each system, got two with this one")
        self.recipe, self.points = recipe, points
        # In front of the overrides, which may say no.
        self.overrides = [*["train.test_bleu=true"] * plain.data.tests, *overrides]
        self.folder = output or Path(f"{plain.output}-sweep")
        self.pilots = {point: [self.run(pilot, 1) for pilot in point.pilots] for point in points}
        # What a recipe refuses is refused here, before anything runs.
        for point in points:
            self.runs(point)

    def run(self, point: Point, seed: int, folder: Path | None = None) -> Run:
        """A run of a point, in a folder under that of the sweep or in another one."""
        own = [*self.overrides, *point.overrides]
        if point.steps:
            few = f"{{max_steps: {point.steps}, max_minutes: null, patience: null}}"
            # The second run of a model that grows may have a length of its own.
            growing = "train" in (load_recipe(self.recipe, own).grow or {})
            own += [f"train={few}", *[f"grow.train={few}"] * growing]
            own += ["train.test_bleu=false", "train.validate_bleu=false"]
        folder = folder or self.folder / ("pilots" if point.steps else "") / point.folder
        own += [f"train.seed={seed}", f"output={json.dumps(f'{folder}/seed-{seed}')}"]
        return Run(point, load_recipe(self.recipe, [*own, "resume=true"]))

    def runs(self, point: Point) -> list[Run]:
        """The runs of a point, with the value of the pilot with the lowest dev NLL so far."""
        tried = self.pilots[point]
        chosen = min(tried, key=lambda run: run.nll).point if tried else point
        point = replace(point, overrides=chosen.overrides)
        return [self.run(point, seed) for seed in range(1, point.seeds + 1)]

    def plan(self, only: Sequence[Point], jobs: int) -> str | None:
        """Measures a few steps of every point that has runs to make, unless all are short, and says
        what these runs take; None where no run is left."""
        both = {point: [*self.pilots[point], *self.runs(point)] for point in only}
        left = [(point, run) for point, own in both.items() for run in own if run.found is None]
        steps = [steps_of(run.recipe) for _, run in left]
        counted = f"plan: runs {len(left)}, steps {sum(filter(math.isfinite, steps)):,}"
        if all(count <= SHORT * MEASURED for count in steps):
            return f"{counted}, too few to measure" if steps else None
        with TemporaryDirectory(dir=self.folder, prefix="plan-") as folder:
            trials = {}
            for point, _ in left:
                short = replace(point, name=f"plan of {point.name}", steps=MEASURED)
                trials[point] = self.run(short, 1, Path(folder, point.folder))
            make_runs(trials.values(), jobs)
        seconds, peak = [], 0
        for (point, run), count in zip(left, steps, strict=True):
            trial = trials[point].found
            step, limit = trial.get("step_seconds"), run.recipe.train.max_minutes
            seconds.append(min(count * (step or math.inf), 60 * (limit or math.inf)))
            peak = max(peak, trial.get("peak_bytes", 0))
        # The longest run is as long with any number of processes.
        hours = max(sum(seconds) / jobs, *seconds) / 3600
        took = f"{hours:.1f}" if hours < math.inf else "unknown"
        return (
            f"{counted}, hours {took} with --jobs {jobs}, memory of a process "
            f"{format_bytes(peak)}; by {MEASURED} measured steps of each, without translation"
        )

    def make(
        self, only: Sequence[Point], jobs: int, write: Callable[[Results, Results], None]
    ) -> bool:
        """Makes the pilots and then the runs of some points; returns whether none failed.

        A point with a pilot that failed starts no run: the pilot may still win.

        Args:
            jobs: processes at once; 0: no run is made, and only finished ones have results.
            write: called with the results of all points and of all pilots so far, first with those
                that were there.
        """
        make_runs([run for point in only for run in self.pilots[point]], jobs)
        tried = self.pilots.values()
        runs = {point: self.runs(point) for point in self.points}
        failed = [point for point in self.points if any(run.failed for run in self.pilots[point])]
        ready = [point for point in only if point not in failed]

        def write_so_far() -> None:
            if found := _found(runs):
                # The first system stays the baseline, with or without results.
                lines = {self.points[0], *failed, *found}
                results = {point: found.get(point, []) for point in self.points if point in lines}
                write(results, _found({run.point: [run] for own in tried for run in own}))

        write_so_far()
        make_runs([run for point in ready for run in runs[point]], jobs, write_so_far)
        return not any(run.failed for own in (*tried, *runs.values()) for run in own)


def _found(runs: Mapping[Point, Sequence[Run]]) -> Results:
    """The results so far of those points that have any."""
    found = {point: [run.found for run in own if run.found] for point, own in runs.items()}
    return {point: own for point, own in found.items() if own}


def steps_of(recipe: Recipe) -> float:
    """How many steps a run takes at most, or what is left of one with two stages; infinity where
    only time or patience ends it."""
    counts = [stage.train.max_steps for stage in stages_of(recipe)]
    return math.inf if None in counts else sum(counts)
