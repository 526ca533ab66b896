"""What a sweep will take, before it begins: `MEASURED` steps of every point tell."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepfast.memory.units import format_bytes
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Processes, Result, Run, compare, some
from deepfast.mt.training.growing import second_run

MEASURED = 20
"""Steps that are measured."""
SHORT = 10
"""Runs of fewer than this many times the measured steps are not worth a measurement."""
FOLDER = "plan"


def steps_of(run: Run) -> int | None:
    """How many steps a run takes at most; None where only time or patience ends it."""
    recipe = run.recipe
    parts = [recipe.train]
    if recipe.grow is not None and recipe.model.get("kind") != "depth_growing":
        # One that grows on a checkpoint has no first run.
        parts = [] if recipe.grow.get("from") else parts
        parts.append(second_run(recipe).train)
    counts = [part.max_steps for part in parts if part.max_steps is not None]
    return sum(counts) if len(counts) == len(parts) else None


def _trial(point: Point, run: Run, folder: Path) -> Run:
    """The first steps of a run, without what comes after them."""
    few: dict[str, Any] = {"max_steps": MEASURED, "max_minutes": None, "patience": None}
    recipe = run.recipe
    train = replace(
        recipe.train, log_every=MEASURED, validate_every=MEASURED, save_every=MEASURED,
        average_last=0, test_bleu=False, validate_bleu=False, **few,
    )  # fmt: skip
    grow = recipe.grow and recipe.grow | {"train": recipe.grow.get("train", {}) | few}
    return Run(
        f"plan, {point.name}",
        replace(recipe, train=train, grow=grow),
        folder / FOLDER / point.folder,
    )


def plan(
    left: Mapping[Point, Sequence[Run]],
    first: Mapping[Point, Run],
    processes: Processes,
    folder: Path,
) -> str | None:
    """Measures a few steps of every point with runs to make, and says what these runs take; None
    where nothing is left, or where no run is long.

    Args:
        left: the runs to make of every point, those of its pilots too.
        first: the run of every point whose steps are measured, the same whatever is left.
        folder: of the sweep. The measurements stay in it, so a second plan has them.
    """
    left = {point: own for point, own in left.items() if own}
    counts = {run: steps_of(run) for own in left.values() for run in own}
    if not any(count is None or count > SHORT * MEASURED for count in counts.values()):
        return None
    trials = {point: [_trial(point, first[point], folder)] for point in left}
    for (trial,) in trials.values():
        try:
            trial.result()
        except ValueError:
            # The system or the text has changed; its results are refused elsewhere.
            shutil.rmtree(trial.folder)
    measured = compare(trials, processes)
    lengths, peaks, unknown = [], [], 0
    for point, own in left.items():
        found: Result = next(iter(measured[point].values()))
        peaks.append(found.get("process_bytes", 0))
        for run in own:
            count, limit = counts[run], run.recipe.train.max_minutes
            takes = [60 * limit] if limit else []
            if count is not None and "step_seconds" in found:
                takes.append(count * found["step_seconds"])
            lengths.append(min(takes, default=0.0))
            unknown += not takes
    seconds = max(sum(lengths) / processes.jobs, max(lengths))
    total = sum(count or 0 for count in counts.values())
    text = (
        f"plan: {some(len(counts), 'run')} of {some(len(left), 'point')}, {total:,} steps; about "
        f"{seconds / 3600:.1f} hours with "
        f"{some(processes.jobs, 'process', 'es')}, by {MEASURED} measured steps of each point, "
        f"without translation; at most {format_bytes(max(peaks))} in a process"
    )
    return text + (f"; the time of {some(unknown, 'run')} is unknown" if unknown else "")
