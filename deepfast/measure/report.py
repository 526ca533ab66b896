"""A whole report: measures, trains, and returns everything as plain values."""

import json
import sys
import time
from dataclasses import asdict

from deepfast.machine import environment
from deepfast.measure.mixing import mixing
from deepfast.measure.settings import Settings
from deepfast.measure.stacks import policies, steps
from deepfast.measure.training import Training
from deepfast.measure.turns import measure

FORMAT, VERSION = "deepfast report", 4


def make_report(settings: Settings, command: str) -> dict:
    """Measures all chapters; returns the content of report.json.

    Ctrl-C ends the measurements. The report then has what was measured before. A training that
    fails is a sentence on the page.

    Args:
        settings: sizes and counts of runs.
        command: the command that makes the same report again, for the page.
    """
    chapters = {
        "steps": steps(settings, "deepfast"),
        "mixing": mixing(settings),
        "policies": policies(settings),
    }
    training = Training(settings)
    if not settings.training:
        training.chapter["status"] = "not asked for"
    machine, began, interrupted = environment(), time.perf_counter(), False
    try:
        measure([turns for found in chapters.values() for turns in found])
        try:
            measure([training] * settings.training)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"deepfast report: training failed: {error}", file=sys.stderr)
            training.chapter["status"] = f"failed: {error}"
    except KeyboardInterrupt:
        interrupted = True
    report: dict = {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "interrupted": interrupted,
        "environment": machine,
        "settings": asdict(settings),
        **{
            name: [row.as_dict() for turns in found for row in turns.rows]
            for name, found in chapters.items()
        },
        "training": training.chapter,
        "seconds": time.perf_counter() - began,
    }
    # JSON has no NaN and no infinity.
    return json.loads(json.dumps(report), parse_constant=lambda _: None)
