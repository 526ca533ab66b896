"""A whole report: measures, trains, and returns everything as plain values."""

import math
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from deepfast.machine import environment
from deepfast.measure import memory_steps
from deepfast.measure.clock import COPY, Row
from deepfast.measure.jobs import Job, run_jobs
from deepfast.measure.mixing import mixing
from deepfast.measure.report_pictures import memory_curves
from deepfast.measure.settings import Settings
from deepfast.measure.steps import steps
from deepfast.measure.training import Training
from deepfast.memory import plan

FORMAT, VERSION = "deepfast report", 3
CHAPTERS = {
    "steps": steps,
    "mixing": mixing,
    "policies": memory_steps.policies,
}
"""Key of report.json -> what is measured for it, from the settings."""
PLANNED: dict[str, Any] = {"dim": 512, "tokens": 8192, "vocab_size": 32_000, "decoder_layers": 0}
"""The model whose memory is predicted. The rest are `plan`'s defaults: bf16 autocast, Adam,
dropout, CUDA."""


def make_report(settings: Settings, command: str) -> dict:
    """Runs all jobs of a report; returns the content of report.json.

    Ctrl-C ends the measurements. The report then has what was measured before.

    Args:
        settings: sizes and counts of runs.
        command: the command that makes the same report again, for the page.
    """
    jobs: list[Job] = []
    rows: dict[str, list[Row]] = {}
    for name, chapter in CHAPTERS.items():
        groups = chapter(settings)
        rows[name] = [row for group in groups for row in group.rows]
        jobs += [job for group in groups for job in group.jobs()]
    training = Training(settings) if settings.training else None
    if training is not None:
        jobs += [Job(j.part, j.label, partial(_keep_going, j, training)) for j in training.jobs()]
    machine = environment()
    interrupted, seconds = False, dict[str, float]()
    try:
        run_jobs(jobs, seconds)
    except KeyboardInterrupt:
        interrupted = True
    sizes = plan(budget="1TiB", num_layers=1, **PLANNED).sizes
    report: dict = {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "interrupted": interrupted,
        "environment": machine,
        "settings": asdict(settings) | {"tokens": settings.tokens},
        **{name: [row.as_dict() for row in found] for name, found in rows.items()},
        "policies": memory_steps.policy_chapter(settings, rows["policies"]),
        "predicted": {"model": PLANNED, "curves": memory_curves(sizes)},
        "training": {"status": "not asked for"} if training is None else training.chapter,
        "seconds": seconds | {"total": sum(seconds.values())},
    }
    copies = {row.depth: row.gb_per_second for row in rows["mixing"] if row.variant == COPY}
    for row in report["mixing"]:
        speed, copy = row["gb_per_second"], copies[row["depth"]]
        row["fraction_of_copy"] = speed / copy if speed and copy else None
    return _plain(report)


def _keep_going(job: Job, training: Training) -> None:
    """Runs the job. Its failure becomes a sentence on the page, so that earlier measurements are
    kept."""
    if training.chapter["status"].startswith("failed"):
        return
    try:
        job.run()
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"deepfast report: training failed: {error}", file=sys.stderr)
        training.chapter["status"] = f"failed: {error}"


def _plain(value):
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
