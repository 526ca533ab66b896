"""The pictures of the report's page, and of a plan: each draws one panel from plain values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from deepfast.measure.encoders import RESIDUAL
from deepfast.measure.pictures import (
    BLUE,
    COLORS,
    HEIGHT,
    WIDTH,
    Curve,
    Look,
    inline,
    label_ends,
    line_at,
    new_figure,
    over_depth,
    picture,
    styled,
    weight_map,
)
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes
from deepfast.policies import POLICIES, policies_of

MIB, GIB = 1 << 20, 1 << 30
DEPTHS = (6, 12, 20, 30, 60, 100, 200)
"""Layers of the memory curves."""
GREENS = ("#54ab83", "#26875f", COLORS["deepfast"], "#063b2a")
"""A colour for each policy."""
NAMES = {policy: f"deepfast, {policy}" for policy in POLICIES}
"""Policy -> name of its curve."""
STEPS = Look(COLORS, strong=("deepfast",), dashed=(RESIDUAL,))
MEMORY = Look(
    dict(zip(NAMES.values(), GREENS, strict=True)), strong=(NAMES["none"], NAMES["layer+input"])
)
CONNECTION_COLORS = COLORS["deepfast"], BLUE, COLORS["DenseFormer form"]
RUNS = {
    "dlcl": ("DLCL, pre-norm", COLORS["deepfast"]),
    "twin": ("residual, post-norm", COLORS["stack and sum"]),
}
"""Key of a training -> its name and its colour."""
LINES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1, "alpha": 0.55},
    "dev": {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
}
"""Curve of a training -> how it looks."""


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    spoken: str
    """What it shows, for screen readers."""
    draw: Callable[[Any, dict], None]
    """Draws the report's values on a panel; without values nothing."""
    width: float = WIDTH
    height: float = HEIGHT


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page by name, as SVG text; None without data."""
    drawn: dict[str, str | None] = {}
    with styled():
        for name, one in PICTURES.items():
            figure = new_figure(one.width, one.height)
            axes = figure.add_subplot()
            one.draw(axes, report)
            drawn[name] = inline(figure, name, one.spoken) if axes.has_data() else None
    return drawn


def _curves(rows: list[dict], field: str, scale: float) -> dict[str, list]:
    """Name -> (layers, number) of the rows that ran and have the field."""
    curves: dict[str, list] = {}
    for row in rows:
        if row[field] and (row["peak_bytes"] or row["median_seconds"]):
            name = row["variant"].removesuffix(": deepfast")
            curves.setdefault(name, []).append((row["depth"], row[field] * scale))
    return curves


def _steps(axes, report: dict, *, field: str, title: str, scale: float = 1.0) -> None:
    """A curve for each variant."""
    if curves := _curves(report["steps"], field, scale):
        axes.set_title(title)
        over_depth(axes, curves, STEPS)


def _connections(axes, report: dict, *, field: str, title: str, scale: float) -> None:
    """A curve for each connection, and one of the same colour for its plain form."""
    rows = report["connections"]
    names = dict.fromkeys(row["what"] for row in rows)
    curves = _curves(rows, field, scale)
    plain = [name for name in curves if name not in names]
    if len(plain) < len(curves):
        color_of = dict(zip(names, CONNECTION_COLORS, strict=True))
        colors = {name: color_of[name.partition(":")[0]] for name in curves}
        axes.set_title(title)
        over_depth(axes, curves, Look(colors, dashed=plain, unnamed=plain), "layers")


def _policies(axes, report: dict) -> None:
    """A point for each policy, connected in the policies' order."""
    rows = [row for row in report["policies"]["rows"] if row["relative"]]
    if not rows:
        return
    points = {row["variant"]: (row["relative"], row["peak_bytes"] / MIB) for row in rows}
    look = Look(dict(zip(points, GREENS, strict=False)))
    times, peaks = zip(*points.values(), strict=True)
    axes.plot(times, peaks, color="#9aa3ab", linewidth=1.2, zorder=2)
    axes.scatter(times, peaks, c=look.colors.values(), s=64, zorder=3)
    room = max(0.05, 0.12 * (max(times) - min(times)))
    axes.set_xlim(min(times) - room, max(times) + room)
    axes.set_ylim(0, 1.08 * max(peaks))
    axes.set_xlabel("time of a step, relative to none")
    axes.set_title(f"peak MiB, {rows[0]['depth']} layers")
    label_ends(axes, {policy: [point] for policy, point in points.items()}, look)


def _memory(axes, report: dict) -> None:
    """Predicted memory over depth, of `memory_curves`."""
    axes.set_title(report["curves"]["title"])
    over_depth(axes, report["curves"]["points"], MEMORY, log=True)


def _losses(axes, report: dict) -> None:
    """NLL over the steps of the trainings: lines for training batches, points for dev."""
    training = report["training"]
    if training["status"] != "measured":
        return
    ends: dict[str, Curve] = {}
    for key, run in training["runs"].items():
        name, color = RUNS[key]
        for part, line in LINES.items():
            points = [(step, nll) for step, nll, _ in run["curve"][part]]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, **line)
                ends[name] = points
    if training["unigram_nll"] is not None:
        line_at(axes, "token frequencies alone", training["unigram_nll"], right=True)
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    axes.set_title("NLL, nats per target token")
    label_ends(axes, ends, Look(dict(RUNS.values())))


def _weights(axes, report: dict) -> None:
    """Learned W."""
    import numpy as np

    if report["training"]["status"] != "measured":
        return
    matrix = np.array(report["training"]["weights"])
    mesh = weight_map(axes, matrix, hidden=np.triu(np.ones_like(matrix, dtype=bool), 1))
    axes.figure.colorbar(mesh, ax=axes, shrink=0.7, pad=0.02, extend="both")


def _of_connections(field: str, title: str, scale: float) -> Picture:
    """One of three pictures side by side."""
    draw = partial(_connections, field=field, title=title, scale=scale)
    return Picture(f"{title} of every connection over layers", draw, 3.6, 3.6)


PICTURES = {
    "time": Picture(
        "Time of a step over encoder layers, all variants",
        partial(_steps, field="median_seconds", title="Time of a step, seconds"),
    ),
    "memory": Picture(
        "Peak memory of a step over encoder layers, all variants",
        partial(_steps, field="peak_bytes", title="Peak memory of a step, GiB", scale=1 / GIB),
    ),
    "connection-traffic": _of_connections("nbytes", "counted traffic, GB", 1e-9),
    "connection-time": _of_connections("median_seconds", "time, ms", 1e3),
    "connection-memory": _of_connections("peak_bytes", "peak memory, MiB", 1 / MIB),
    "policies": Picture("Peak memory over the time of a step, every recompute policy", _policies),
    "depth_memory": Picture("Predicted peak memory of a step over encoder layers", _memory),
    "losses": Picture("Training and dev NLL over optimizer steps", _losses, height=3.1),
    "weights": Picture("Heat map of the learned depth weights", _weights, height=WIDTH * 0.8),
}
"""Every picture of the page, by its name there."""


# ---- predicted memory over depth -----------------------------------------------------------------


def memory_curves(sizes: Sizes) -> dict[str, list[tuple[int, float]]]:
    """Name -> (layers, GiB): each policy, the same on all layers."""
    found: dict[str, list[tuple[int, float]]] = {}
    for layers in DEPTHS:
        deep = replace(sizes, num_layers=layers)
        for policy in policies_of(sizes.connection):
            peak = uniform_peak(deep, policy) / GIB
            found.setdefault(NAMES[policy], []).append((layers, peak))
    return found


def memory_title(sizes: Sizes) -> str:
    """The title of a picture of ``sizes``, one line."""
    return f"predicted peak of a step, GiB: {sizes.dim} wide, {sizes.tokens:,} tokens"


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes the memory of the plan's model over depth, with a line at the budget, as SVG or PNG,
    by the file's ending."""
    with picture(path) as figure:
        axes = figure.add_subplot()
        axes.set_title(memory_title(plan.sizes))
        line_at(axes, f"budget {format_bytes(plan.budget)}", plan.budget / GIB)
        over_depth(axes, memory_curves(plan.sizes), MEMORY, log=True)
