"""The pictures of the report's page, and of a plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepfast.measure.forms import RESIDUAL, STACK
from deepfast.measure.mixing import CONNECTIONS
from deepfast.measure.pictures import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    drawing,
    inline,
    line_at,
    over_depth,
    picture,
    weight_map,
)
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes
from deepfast.policies import POLICIES, policies_of

MIB, GIB = 1 << 20, 1 << 30
DEPTHS = (6, 12, 20, 30, 60, 100, 200)
"""Layers of the predicted memory."""
RUNS = {"dlcl": "DLCL, pre-norm", "twin": "residual, post-norm"}
"""Key of a training -> its name."""
NAME_COLORS = {
    **COLORS,
    **dict(zip(CONNECTIONS, (GREEN, BLUE, "#b8548f"), strict=True)),
    **dict(zip(POLICIES, (GREY, BLUE, "#b8860b", GREEN), strict=True)),
    **dict(zip(RUNS.values(), (GREEN, "#d55e00"), strict=True)),
}
"""What a curve shows -> its colour."""


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page by name, as SVG text; None without data."""
    drawn: dict[str, str | None] = {}
    for name, (title, fill) in PICTURES.items():
        with drawing() as figure:
            axes = figure.add_subplot(title=title)
            fill(axes, report)
            drawn[name] = inline(figure, name, title) if axes.has_data() else None
    return drawn


def _chapter(name: str, field: str, unit: float) -> Callable[[Any, dict], None]:
    """Draws a field of a chapter over depth, a curve for each variant; without values nothing."""

    def fill(axes, report: dict) -> None:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in report[name]:
            label = row["variant"]
            if row["what"]:
                # Of a connection alone deepfast and the published form. The legend leaves out names
                # that begin with _.
                label = {"deepfast": row["what"], STACK: f"_{row['what']}"}.get(label, "")
            if label and row[field]:
                curves.setdefault(label, []).append((row["depth"], row[field] * unit))
        if curves:
            colors = {label: NAME_COLORS[label.removeprefix("_")] for label in curves}
            dashed = [label for label in curves if label == RESIDUAL or label.startswith("_")]
            over_depth(axes, curves, colors, across="layers", strong=("deepfast",), dashed=dashed)

    return fill


def _losses(axes, report: dict) -> None:
    """Dev NLL over the steps of the trainings."""
    training = report["training"]
    if training["status"] == "measured":
        curves = {RUNS[key]: run["curve"] for key, run in training["runs"].items() if run["curve"]}
        over_depth(axes, curves, NAME_COLORS, across="optimizer steps")


def _weights(axes, report: dict) -> None:
    """Learned W."""
    import numpy as np

    if report["training"]["status"] == "measured":
        matrix = np.array(report["training"]["weights"])
        weight_map(axes, matrix, np.triu(np.ones_like(matrix, dtype=bool), 1))


PICTURES = {
    "time": ("Time of a step, seconds", _chapter("steps", "median_seconds", 1)),
    "memory": ("Peak memory of a step, GiB", _chapter("steps", "peak_bytes", 1 / GIB)),
    "mixing-time": ("Time, ms", _chapter("mixing", "median_seconds", 1e3)),
    "mixing-memory": ("Peak memory, MiB", _chapter("mixing", "peak_bytes", 1 / MIB)),
    "policies": ("Peak memory of a step, MiB", _chapter("policies", "peak_bytes", 1 / MIB)),
    "losses": ("Dev NLL, nats per target token", _losses),
    "weights": ("Learned depth weights", _weights),
}
"""Name of a picture on the page -> its title, and what draws it on a panel."""


# ---- predicted memory over depth -----------------------------------------------------------------


def memory_curves(sizes: Sizes) -> dict[str, list[tuple[int, float]]]:
    """Policy of all layers -> (layers, GiB)."""
    return {
        policy: [
            (layers, uniform_peak(replace(sizes, num_layers=layers), policy) / GIB)
            for layers in DEPTHS
        ]
        for policy in policies_of(sizes.connection)
    }


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes the memory of the plan's model over depth, with a line at the budget, as SVG or PNG,
    by the file's ending."""
    sizes = plan.sizes
    title = f"Predicted peak of a step, GiB: {sizes.dim} wide, {sizes.tokens:,} tokens"
    with picture(path) as figure:
        axes = figure.add_subplot(title=title)
        line_at(axes, f"budget {format_bytes(plan.budget)}", plan.budget / GIB)
        over_depth(axes, memory_curves(sizes), NAME_COLORS, log=True)
