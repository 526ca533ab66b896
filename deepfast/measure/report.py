"""A whole report: measures, trains, and returns everything as plain values."""

import math
import sys
from dataclasses import asdict

from deepfast.measure import deepest, depth_picture, policies
from deepfast.measure.agreement import agreement
from deepfast.measure.clock import COPY
from deepfast.measure.connections import connections
from deepfast.measure.machine import environment
from deepfast.measure.progress import Job, Progress
from deepfast.measure.rows import Row
from deepfast.measure.settings import Settings
from deepfast.measure.sweep import mixing, sweep
from deepfast.measure.training import Training
from deepfast.memory import plan

FORMAT, VERSION = "deepfast report", 2


def make_report(settings: Settings, command: str, progress: Progress) -> dict:
    """Runs all jobs of a report; returns the content of report.json.

    Ctrl-C ends the measurements. The report then has what was measured before.

    Args:
        settings: sizes and counts of runs.
        command: the command that makes the same report again, for the page.
        progress: runs the jobs and shows the progress.
    """
    names = "steps", "mixing", "connections", "policies", "held"
    rows: dict[str, list[Row]] = {name: [] for name in names}
    same: dict = {"rows": []}
    training = Training(settings) if settings.training else None
    jobs = [
        Job(
            "agreement", "every form against float64", 3.0, lambda: same.update(agreement(settings))
        )
    ]
    jobs += sweep(settings, rows["steps"])
    jobs += mixing(settings, rows["mixing"])
    jobs += connections(settings, rows["connections"])
    jobs += policies.policies(settings, rows["policies"])
    jobs += deepest.held(settings, rows["held"])
    if training is not None:
        jobs += [_kept_going(job, training) for job in training.jobs()]
    machine = environment()
    interrupted = False
    try:
        progress.run(jobs)
    except KeyboardInterrupt:
        interrupted = True
    sizes = plan(budget="1TiB", layers=1, **deepest.MODEL).sizes
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
        "policies": policies.chapter(settings, rows["policies"]),
        "held": {
            "tokens": deepest.HELD_BATCH * deepest.HELD_LENGTH,
            **deepest.HELD_MODEL,
            "rows": [row.as_dict() | {"ratio": _ratio(row)} for row in rows["held"]],
        },
        "deepest": deepest.deepest(),
        "curves": {"title": depth_picture.title_of(sizes), "points": depth_picture.curves(sizes)},
        "training": {"status": "not asked for"} if training is None else training.chapter,
        "seconds": progress.seconds | {"total": sum(progress.seconds.values())},
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

    return Job(job.part, job.label, job.work, run)


def _ratio(row: Row) -> float | None:
    return row.predicted_bytes / row.peak_bytes if row.peak_bytes else None


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
