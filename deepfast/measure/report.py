"""A whole report: measures, trains, and returns everything as plain values."""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict

from deepfast.machine import environment
from deepfast.measure import memory_steps
from deepfast.measure.clock import COPY, Row
from deepfast.measure.connections import connections
from deepfast.measure.jobs import Job, Turns, run_jobs
from deepfast.measure.report_pictures import memory_curves, memory_title
from deepfast.measure.settings import Settings
from deepfast.measure.steps import agreement, mixing, steps
from deepfast.measure.training import Training

FORMAT, VERSION = "deepfast report", 2
CHAPTERS: dict[str, Callable[[Settings], list[Turns]]] = {
    "steps": steps,
    "mixing": mixing,
    "connections": connections,
    "policies": memory_steps.policies,
    "held": memory_steps.held,
}
"""Key of report.json -> what is measured for it, from the settings."""


def make_report(settings: Settings, command: str) -> dict:
    """Runs all jobs of a report; returns the content of report.json.

    Ctrl-C ends the measurements. The report then has what was measured before.

    Args:
        settings: sizes and counts of runs.
        command: the command that makes the same report again, for the page.
    """
    same: dict = {"rows": []}

    def agree() -> None:
        same.update(agreement(settings))

    jobs = [Job("agreement", "every form against float64", agree)]
    rows: dict[str, list[Row]] = {}
    for name, chapter in CHAPTERS.items():
        groups = chapter(settings)
        rows[name] = [row for group in groups for row in group.rows]
        jobs += [job for group in groups for job in group.jobs()]
    training = Training(settings) if settings.training else None
    if training is not None:
        jobs += [_kept_going(job, training) for job in training.jobs()]
    machine = environment()
    interrupted, seconds = False, dict[str, float]()
    try:
        run_jobs(jobs, seconds)
    except KeyboardInterrupt:
        interrupted = True
    sizes = memory_steps.planned_sizes()
    report = {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "interrupted": interrupted,
        "environment": machine,
        "settings": asdict(settings) | {"tokens": settings.tokens},
        "agreement": same,
        "steps": [row.as_dict() for row in rows["steps"]],
        "mixing": _with_copy(rows["mixing"]),
        "connections": [row.as_dict() for row in rows["connections"]],
        "policies": memory_steps.policy_chapter(settings, rows["policies"]),
        "held": memory_steps.held_chapter(rows["held"]),
        "deepest": memory_steps.deepest(),
        "curves": {"title": memory_title(sizes), "points": memory_curves(sizes)},
        "training": {"status": "not asked for"} if training is None else training.chapter,
        "seconds": seconds | {"total": sum(seconds.values())},
    }
    return _plain(report)


def _kept_going(job: Job, training: Training) -> Job:
    """A job whose failure becomes a sentence on the page, so that earlier measurements are kept."""

    def run() -> None:
        if training.chapter["status"].startswith("failed"):
            return
        try:
            job.run()
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"deepfast report: training failed: {error}", file=sys.stderr)
            training.chapter["status"] = f"failed: {error}"

    return Job(job.part, job.label, run)


def _with_copy(rows: list[Row]) -> list[dict]:
    """The rows of the mixing alone, with their bandwidth as a fraction of the copy's."""
    copy = next(row for row in rows if row.variant == COPY).gb_per_second
    found = []
    for row in rows:
        speed = row.gb_per_second
        found.append(row.as_dict() | {"fraction_of_copy": speed / copy if speed and copy else None})
    return found


def _plain(value):
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
