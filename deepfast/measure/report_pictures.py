"""The pictures of the report's page, and of a plan: each draws one panel from plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepfast.measure.encoders import VARIANTS
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
from deepfast.memory.eager import EAGER, RESIDUAL, eager_peak
from deepfast.memory.plan import Plan, uniform_peak
from deepfast.memory.policies import MIXING, POLICIES
from deepfast.memory.sizes import Sizes
from deepfast.memory.units import format_bytes

MIB, GIB = 1 << 20, 1 << 30
DEPTHS = (6, 12, 20, 30, 60, 100, 200)
"""Layers of the memory curves."""
GREENS = ("#54ab83", "#3f9d75", "#26875f", COLORS["deepfast"], "#063b2a")
"""A colour for each policy."""
NAMES = {policy: f"deepfast, {policy}" for policy in POLICIES}
"""Policy -> name of its curve."""
STEPS = Look(COLORS, strong=("deepfast",), dashed=(RESIDUAL,))
MEMORY = Look(
    dict(zip(NAMES.values(), GREENS, strict=True))
    | {form: COLORS.get(form, BLUE) for form in EAGER}
    | {"deepfast": COLORS["deepfast"]},
    strong=(NAMES["keep"], NAMES["history"], "deepfast"), dashed=(RESIDUAL,),
)  # fmt: skip
MEMORY_HEIGHT = 3.9
"""Inches: high enough for nine names below each other."""
CONNECTION_COLORS = (
    COLORS["deepfast"], BLUE, COLORS["DenseFormer form"], COLORS["loop of adds"],
)  # fmt: skip
RUNS = {"dlcl": "DLCL, pre-norm", "twin": "residual, post-norm"}


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    spoken: str
    """What it shows, for screen readers."""
    draw: Callable[[Any, dict], object]
    """Draws the report's values on a panel; returns False if there are none."""
    width: float = WIDTH
    height: float = HEIGHT


def draw(report: dict) -> dict[str, str | None]:
    """Every picture of the page by name, as SVG text; None without data."""
    drawn: dict[str, str | None] = {}
    with styled():
        for name, one in PICTURES.items():
            figure = new_figure(one.width, one.height)
            found = one.draw(figure.add_subplot(), report)
            drawn[name] = None if found is False else inline(figure, name, one.spoken)
    return drawn


def _steps(field: str, title: str, scale: float = 1.0) -> Callable:
    """A curve of a field for each variant."""

    def over(axes, report: dict) -> bool:
        curves: dict[str, list] = {variant: [] for variant in VARIANTS}
        for row in report["steps"]:
            if row[field]:
                curves[row["variant"]].append((row["depth"], row[field] * scale))
        curves = {variant: sorted(points) for variant, points in curves.items() if points}
        if curves:
            axes.set_title(title)
            over_depth(axes, curves, STEPS)
        return bool(curves)

    return over


def _connections(field: str, title: str, scale: float) -> Callable:
    """A curve of a field for each connection, and one of the same colour for its plain form."""

    def over(axes, report: dict) -> bool:
        rows = report["connections"]
        names = dict.fromkeys(row["what"] for row in rows)
        color_of = dict(zip(names, CONNECTION_COLORS, strict=True))
        curves: dict[str, list] = {}
        colors = {}
        for row in rows:
            if row[field] and row["seconds"]:
                ours = row["variant"].endswith(": deepfast")
                name = row["what"] if ours else row["variant"]
                curves.setdefault(name, []).append((row["depth"], row[field] * scale))
                colors[name] = color_of[row["what"]]
        plain = [name for name in curves if name not in names]
        if len(plain) == len(curves):
            return False
        axes.set_title(title)
        over_depth(axes, curves, Look(colors, dashed=plain, unnamed=plain), "layers")
        return True

    return over


def _policies(axes, report: dict) -> bool:
    """A point for each policy, connected in the policies' order."""
    rows = [row for row in report["policies"]["rows"] if row["relative"]]
    if not rows:
        return False
    points = {row["variant"]: (row["relative"], row["peak_bytes"] / MIB) for row in rows}
    look = Look(dict(zip(points, GREENS, strict=False)))
    times, peaks = zip(*points.values(), strict=True)
    axes.plot(times, peaks, color="#9aa3ab", linewidth=1.2, zorder=2)
    axes.scatter(times, peaks, c=look.colors.values(), s=64, zorder=3)
    room = max(0.05, 0.12 * (max(times) - min(times)))
    axes.set_xlim(min(times) - room, max(times) + room)
    axes.set_ylim(0, 1.08 * max(peaks))
    axes.set_xlabel("time of a step, relative to keep")
    axes.set_title(f"peak MiB, {rows[0]['depth']} layers")
    label_ends(axes, {policy: [point] for policy, point in points.items()}, look)
    return True


def _deepest(axes, report: dict) -> None:
    """Layers over budgets; a form has no point if not even one layer fits."""
    budgets = [budget["bytes"] / GIB for budget in report["deepest"]["budgets"]]
    curves = {
        form: [pair for pair in zip(budgets, layers, strict=True) if pair[1]]
        for form, layers in report["deepest"]["layers"].items()
    }
    axes.set_title("most layers that fit")
    curves = {form: points for form, points in curves.items() if points}
    over_depth(axes, curves, MEMORY, "GiB of the device")


def _losses(axes, report: dict) -> bool:
    """NLL over the steps of the trainings: lines for training batches, points for dev."""
    training = report["training"]
    if training["status"] != "measured":
        return False
    colors = dict(zip(RUNS.values(), (COLORS["deepfast"], COLORS["stack and sum"]), strict=True))
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 1, "alpha": 0.55},
        "dev": {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
    }
    ends: dict[str, Curve] = {}
    for key, run in training["runs"].items():
        for part, style in styles.items():
            points = [(step, nll) for step, nll, _ in run["curve"][part]]
            if points:
                axes.plot(*zip(*points, strict=True), color=colors[RUNS[key]], **style)
                ends[RUNS[key]] = points
    if training["unigram_nll"] is not None:
        line_at(axes, "token frequencies alone", training["unigram_nll"], right=True)
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    axes.set_title("NLL, nats per target token")
    label_ends(axes, ends, Look(colors))
    return True


def _weights(axes, report: dict) -> bool:
    """Learned W."""
    import numpy as np

    if report["training"]["status"] != "measured":
        return False
    matrix = np.array(report["training"]["weights"])
    mesh = weight_map(axes, matrix, hidden=np.triu(np.ones_like(matrix, dtype=bool), 1))
    axes.figure.colorbar(mesh, ax=axes, shrink=0.7, pad=0.02, extend="both")
    return True


# ---- predicted memory over depth -----------------------------------------------------------------


def memory_curves(sizes: Sizes) -> dict[str, list[tuple[int, float]]]:
    """Name -> (layers, GiB): each policy, the same on all layers, and each plain form. All include
    the same margin for a device's allocator."""
    mixes = sizes.connection in MIXING
    found: dict[str, list[tuple[int, float]]] = {}
    for layers in DEPTHS:
        deep = replace(sizes, layers=layers)
        peaks = {form: eager_peak(deep, form) for form in EAGER}
        peaks |= {NAMES[p]: uniform_peak(deep, p) for p in POLICIES if mixes or p != "history"}
        for name, peak in peaks.items():
            found.setdefault(name, []).append((layers, peak / GIB))
    return found


def memory_title(sizes: Sizes) -> str:
    """The title of a picture of ``sizes``, one line."""
    return f"predicted peak of a step, GiB: {sizes.width} wide, {sizes.tokens:,} tokens"


def _memory(axes, curves: Mapping[str, Curve], title: str) -> None:
    axes.set_title(title)
    over_depth(axes, curves, MEMORY)


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes the memory of the plan's model over depth, with a line at the budget, as SVG or PNG,
    by the file's ending."""
    with picture(path, height=MEMORY_HEIGHT) as figure:
        axes = figure.add_subplot()
        line_at(axes, f"budget {format_bytes(plan.budget)}", plan.budget / GIB)
        _memory(axes, memory_curves(plan.sizes), memory_title(plan.sizes))


PICTURES = {
    "time": Picture(
        "Time of a step over encoder layers, all variants",
        _steps("median_seconds", "Time of a step, seconds"),
    ),
    "memory": Picture(
        "Peak memory of a step over encoder layers, all variants",
        _steps("peak_bytes", "Peak memory of a step, GiB", 1 / GIB),
    ),
    "connection-traffic": Picture(
        "counted traffic, GB of every connection over layers",
        _connections("nbytes", "counted traffic, GB", 1e-9), 3.6, 3.6,
    ),
    "connection-time": Picture(
        "time, ms of every connection over layers",
        _connections("median_seconds", "time, ms", 1e3), 3.6, 3.6,
    ),
    "connection-memory": Picture(
        "peak memory, MiB of every connection over layers",
        _connections("peak_bytes", "peak memory, MiB", 1 / MIB), 3.6, 3.6,
    ),
    "policies": Picture(
        "Peak memory over the time of a step, every memory policy", _policies
    ),
    "deepest": Picture(
        "Most encoder layers that fit, over budgets of memory", _deepest, height=MEMORY_HEIGHT
    ),
    "depth_memory": Picture(
        "Predicted peak memory of a step over encoder layers",
        lambda axes, report: _memory(axes, report["curves"]["points"], report["curves"]["title"]),
        height=MEMORY_HEIGHT,
    ),
    "losses": Picture("Training and dev NLL over optimizer steps", _losses, height=3.1),
    "weights": Picture("Heat map of the learned depth weights", _weights, height=WIDTH * 0.8),
}  # fmt: skip
"""Every picture of the page, by its name there."""
