"""The pictures of the report's page by name, as SVG text; None without data."""

from typing import Any

from deepfast.measure.connections import CONNECTIONS, PLAIN
from deepfast.measure.deepest import PLANNED
from deepfast.measure.depth_picture import GREENS, LOOK, MEMORY_HEIGHT, memory_figure
from deepfast.measure.pictures import (
    BLUE,
    COLORS,
    WIDTH,
    Curve,
    Look,
    depth_figure,
    figure_of,
    heat_map,
    inline,
    label_ends,
    set_line,
    set_title,
)
from deepfast.measure.results import GIB, curves
from deepfast.memory.eager import RESIDUAL

MIB = 1 << 20
STEP = {
    "time": ("median_seconds", "Time of a step", "seconds", 1.0),
    "memory": ("peak_bytes", "Peak memory of a step", "GiB", 1 / GIB),
}
"""The picture's name -> the field of a row, the title, the unit, and what a number is multiplied
by."""
CONNECTION = {
    "traffic": ("nbytes", "counted traffic, GB", 1e-9),
    "time": ("median_seconds", "time, ms", 1e3),
    "memory": ("peak_bytes", "peak memory, MiB", 1 / MIB),
}
"""The same for the connections over depth, with the unit in the title."""
CONNECTION_COLORS = dict(
    zip(
        CONNECTIONS,
        (COLORS["deepfast"], BLUE, COLORS["DenseFormer form"], COLORS["loop of adds"]),
        strict=True,
    )
)
THIRD = 3.6, 3.6
"""Inches of one of three pictures side by side."""
RUNS = {"dlcl": "DLCL, pre-norm", "twin": "residual, post-norm"}


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page."""
    drawn = {name: _steps(report["steps"], name) for name in STEP}
    drawn |= {f"connection-{name}": _connection(report["connections"], name) for name in CONNECTION}
    timed = [row for row in report["policies"]["rows"] if row["relative"]]
    title = report["curves"]["title"]
    drawn |= {
        "policies": _time_against_memory(timed) if timed else None,
        "deepest": _deepest(report["deepest"]),
        "depth_memory": inline(
            memory_figure(report["curves"]["points"], title), "depth-memory", title
        ),
    }
    training = report["training"]
    if training["status"] == "measured":
        drawn["losses"] = _losses(training["runs"], training["unigram_nll"])
        drawn["weights"] = _depth_weights(training["weights"])
    return drawn


def _steps(rows: list[dict], name: str) -> str | None:
    """A curve for each variant."""
    field, title, unit, scale = STEP[name]
    found = {v: sorted(points) for v, points in curves(rows, field, scale).items() if points}
    if not found:
        return None
    look = Look(COLORS, strong=("deepfast",), dashed=(RESIDUAL,))
    figure = depth_figure(found, look, f"{title}, {unit}")
    return inline(figure, name, f"{title} over encoder layers, all variants")


def _connection(rows: list[dict], name: str) -> str | None:
    """A curve for each connection, and one of the same colour for its plain form."""
    field, title, scale = CONNECTION[name]
    found: dict[str, list] = {}
    colors, plain = {}, []
    for row in rows:
        if row[field] and row["seconds"]:
            form = row["variant"]
            if form.endswith(PLAIN):
                plain.append(form)
            else:
                form = row["what"]
            found.setdefault(form, []).append((row["depth"], row[field] * scale))
            colors[form] = CONNECTION_COLORS[row["what"]]
    if not any(form not in plain for form in found):
        return None
    look = Look(colors, dashed=plain, unnamed=plain)
    figure = depth_figure(found, look, title, across="layers", size=THIRD)
    return inline(figure, f"connection-{name}", f"{title} of every connection over layers")


def _time_against_memory(rows: list[dict]) -> str:
    """A point for each policy, connected in the policies' order."""
    points = {row["variant"]: (row["relative"], row["peak_bytes"] / MIB) for row in rows}
    figure, axes = figure_of()
    axes.plot(*zip(*points.values(), strict=True), color="#9aa3ab", linewidth=1.2, zorder=2)
    colors = dict(zip(points, GREENS, strict=False))
    for policy, point in points.items():
        axes.plot(*point, color=colors[policy], marker="o", markersize=8, zorder=3)
    low, high = (pick(x for x, _ in points.values()) for pick in (min, max))
    room = max(0.05, 0.12 * (high - low))
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(0, 1.08 * max(y for _, y in points.values()))
    axes.set_xlabel("time of a step, relative to keep")
    set_title(axes, f"peak MiB, {rows[0]['depth']} layers")
    label_ends(figure, axes, {p: [point] for p, point in points.items()}, colors)
    return inline(figure, "policies", "Peak memory over the time of a step, every memory policy")


def _deepest(deepest: dict) -> str:
    """Layers over budgets; a form has no point if not even one layer fits."""
    budgets = [budget["bytes"] / GIB for budget in deepest["budgets"]]
    found = {}
    for form, layers in deepest["layers"].items():
        points = [pair for pair in zip(budgets, layers, strict=True) if pair[1]]
        if points:
            found[form] = points
    look = Look(
        LOOK.colors | {PLANNED: COLORS["deepfast"]}, strong=(PLANNED,), dashed=(RESIDUAL,)
    )  # fmt: skip
    figure = depth_figure(
        found, look, "most layers that fit", across="GiB of the device",
        size=(WIDTH, MEMORY_HEIGHT),
    )  # fmt: skip
    return inline(figure, "deepest", "Most encoder layers that fit, over budgets of memory")


def _losses(runs: dict[str, dict], token_frequencies: float | None) -> str:
    """NLL over the steps of the trainings: lines for training batches, points for dev."""
    figure, axes = figure_of(WIDTH, 3.1)
    colors = dict(zip(RUNS.values(), (COLORS["deepfast"], COLORS["stack and sum"]), strict=True))
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 1, "alpha": 0.55},
        "dev": {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
    }
    ends: dict[str, Curve] = {}
    for key, run in runs.items():
        label, curve = RUNS[key], run["curve"]
        for part, style in styles.items():
            if curve[part]:
                points = [(step, nll) for step, nll, _ in curve[part]]
                axes.plot(*zip(*points, strict=True), color=colors[label], **style)
                ends[label] = points
    if token_frequencies is not None:
        set_line(axes, "token frequencies alone", token_frequencies, right=True)
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    set_title(axes, "NLL, nats per target token")
    label_ends(figure, axes, ends, colors)
    return inline(figure, "losses", "Training and dev NLL over optimizer steps")


def _depth_weights(weights: list[list[float]]) -> str:
    """Learned W as SVG text."""
    import numpy as np

    matrix = np.array(weights)
    hidden = np.triu(np.ones_like(matrix, dtype=bool), 1)
    figure, axes = figure_of(WIDTH, WIDTH * 0.8)
    mesh = heat_map(axes, matrix, hidden=hidden)
    figure.colorbar(mesh, ax=axes, shrink=0.7, pad=0.02, extend="both")
    return inline(figure, "weights", "Heat map of the learned depth weights")
