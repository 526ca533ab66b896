"""A whole report: measure, train, and gather everything as plain values."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from deepfast.measure.agreement import agreement
from deepfast.measure.compiled import compiled
from deepfast.measure.machine import environment
from deepfast.measure.memory_chapter import memory
from deepfast.measure.mixing import mixing
from deepfast.measure.settings import Budget, Settings
from deepfast.measure.sweep import sweep
from deepfast.measure.training import training

FORMAT, VERSION = "deepfast report", 1


def make_report(settings: Settings, command: str, say: Callable[[str], None] = print) -> dict:
    """Measures and trains within ``settings.minutes``; returns what report.json holds.

    Args:
        settings: sizes and budgets.
        command: how to get the same report again, for the page.
        say: told about every number as soon as it is there.
    """
    skipped = set()
    if not settings.memory:
        skipped.add("memory")
    if not settings.compiled:
        skipped.add("compiled")
    if not settings.training:
        skipped |= {"training", "twin", "translation"}
    budget = Budget(60 * settings.minutes, frozenset(skipped))
    report: dict = {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "environment": environment(),
        "settings": asdict(settings) | {"tokens": settings.tokens},
    }
    with budget.start("sweep") as deadline:
        same = agreement(settings, deadline)
        report["agreement"] = same | {"rows": [asdict(row) for row in same["rows"]]}
        steps = sweep(settings, deadline, say)
        report["sweep"] = {"rows": [row.as_dict() for row in steps]}
    with budget.start("mixing") as deadline:
        rows, copy = mixing(settings, deadline, steps, say)
        report["mixing"] = {
            "copy_bytes_per_second": copy,
            "rows": [_with_bandwidth(row.as_dict(), copy) for row in rows],
        }
    report["memory"] = {"status": "not asked for"}
    if settings.memory:
        with budget.start("memory") as deadline:
            report["memory"] = memory(settings, deadline, say)
    report["compiled"] = {"status": "not asked for", "rows": []}
    if settings.compiled:
        with budget.start("compiled") as deadline:
            rows = compiled(settings, deadline, say)
            report["compiled"] = {"status": "measured", "rows": [row.as_dict() for row in rows]}
    report["training"] = {"status": "not asked for"}
    if settings.training:
        report["training"] = _training(settings, budget, say)
    report["seconds"] = budget.spent | {"total": time.perf_counter() - budget.began}
    return _plain(report)


def _training(settings: Settings, budget: Budget, say: Callable[[str], None]) -> dict:
    try:
        return training(settings, budget, say)
    except (RuntimeError, ValueError, ImportError) as error:
        # What was measured before must not be lost; the page shows the reason.
        print(f"deepfast report: training failed: {error}", file=sys.stderr)
        return {"status": f"failed: {error}"}


def _with_bandwidth(row: dict, copy: float | None) -> dict:
    step, nbytes = row["median_seconds"], row["traffic_bytes"]
    speed = nbytes / step if step and nbytes else None
    return row | {
        "bytes_per_second": speed,
        "fraction_of_copy": speed / copy if speed and copy else None,
    }


def _plain(value):
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
