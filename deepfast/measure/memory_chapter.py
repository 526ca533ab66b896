"""The memory chapter: policies measured, closed forms held to measurement, and what fits."""

from dataclasses import asdict

from deepfast.measure import deepest, depth_picture
from deepfast.measure.plain import DROPOUT
from deepfast.measure.policies import (
    PARAMETERS,
    peaks,
    predicted,
    times,
)
from deepfast.measure.rows import MEASURED, Row
from deepfast.measure.settings import Deadline, Settings
from deepfast.measure.sweep import Say
from deepfast.memory import POLICIES, plan

PEAKS, HELD = 0.5, 0.35
"""Shares of the chapter's time: of counted steps of all policies, and of what they leave for small
models in plain PyTorch. The timed rounds take the rest."""


def memory(settings: Settings, deadline: Deadline, say: Say) -> dict:
    """What report.json holds of the chapter."""
    small = predicted(settings, 1, POLICIES[0]).sizes
    sizes = plan(budget="1TiB", layers=1, **deepest.MODEL).sizes
    rows = peaks(settings, Deadline(PEAKS * deadline.left), say)
    held = deepest.held(settings, Deadline(HELD * deadline.left), say)
    timed = times(settings, deadline, rows, say)
    counted = {(row.depth, row.variant): row.peak_bytes for row in rows}
    for row in timed["rows"]:
        row["peak_bytes"] = counted[timed["depth"], row["policy"]]
    return {
        "status": "measured",
        "tokens": settings.memory_tokens,
        "sentences": settings.memory_batch,
        "dim": small.width,
        "heads": small.heads,
        "ffn_dim": small.ffn,
        "dropout": DROPOUT,
        "peaks": [_with_parameters(row, settings) for row in rows],
        "times": timed,
        "deepest": deepest.deepest(),
        "held": held,
        "held_sizes": {"tokens": deepest.HELD_BATCH * deepest.HELD_LENGTH, **deepest.HELD_MODEL},
        "curves": {"title": depth_picture.title_of(sizes), "points": depth_picture.curves(sizes)},
    }


def _with_parameters(row: Row, settings: Settings) -> dict:
    """A row of `peaks`, and the ratios that it stands for: parameters aside, and included."""
    parameters = predicted(settings, row.depth, row.variant).table[PARAMETERS]
    measured = row.peak_bytes
    aside = whole = None
    if measured is not None:
        aside = row.predicted_peak_bytes / measured
        whole = (row.predicted_peak_bytes + parameters) / (measured + parameters)
    plain = asdict(row)
    keys = ("depth", "status", "note", "predicted_peak_bytes", "peak_bytes")
    return {
        "policy": row.variant, **{key: plain[key] for key in keys},
        "parameter_bytes": parameters, "ratio": aside, "ratio_with_parameters": whole,
    }  # fmt: skip


def spread(rows: list[dict], field: str = "ratio") -> dict | None:
    """The lowest and the highest ratio of predicted to measured, and how many there are."""
    ratios = [row[field] for row in rows if row["status"] == MEASURED]
    return {"low": min(ratios), "high": max(ratios), "count": len(ratios)} if ratios else None


def frugal(memory: dict) -> dict | None:
    """What the most frugal policy saves and costs against `keep`, where both were timed."""
    rows = {row["policy"]: row for row in memory.get("times", {}).get("rows", ())}
    if not rows:
        return None
    keep, last = rows[POLICIES[0]], rows[POLICIES[-1]]
    return {
        "depth": memory["times"]["depth"], "policy": POLICIES[-1],
        "saved": keep["peak_bytes"] / last["peak_bytes"], "time": last["relative"],
    }  # fmt: skip
