"""The picture of a sweep: BLEU and dev NLL over its first key, a curve for each other combination.

Numbers lie on an axis and are connected. Anything else, such as names of connections, has places
side by side. Error bars are the standard deviation over the seeds.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.measure.pictures import GREY, WIDTH, picture
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Result
from deepfast.mt.sweep.table import diverged, known

PANELS = {"bleu": "BLEU", "nll": "dev NLL, nats"}
"""What a run's result has -> the title of its panel."""
COLORS = ("#0b6e4f", "#d55e00", "#0072b2", "#e69f00", "#b8548f", "#7a7a7a", "#56b4e9", "#000000")
MARKERS = "osD^vPX*"
RANGE = 8
"""Numbers whose largest is this many times the smallest are on a logarithmic axis."""
LABEL, CAPTION = 22, 68
"""Letters of a line below the axis, and of the caption."""

Results = Mapping[Point, Sequence[Result]]


@dataclass(frozen=True)
class Mark:
    """The runs of one point in one panel."""

    at: int
    """The place of its value among the values of the first key."""
    mean: float
    """Not a number where no run has a result: the curve has a gap there."""
    deviation: float | None
    """None for less than two runs."""


def marks(results: Results, name: str, places: Sequence[str]) -> dict[str, list[Mark]]:
    """Curve -> its marks, in the order of ``places``, the values of the first key."""
    found: dict[str, list[Mark]] = {}
    for point, runs in results.items():
        curve = found.setdefault(", ".join(point.values[1:]), [])
        values = known(runs, name)
        deviation = statistics.stdev(values) if len(values) > 1 else None
        mean = statistics.mean(values) if values else math.nan
        curve.append(Mark(places.index(point.values[0]), mean, deviation))
    return found


def _number(value: str) -> float:
    """A value as a number; NaN for any other."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def caption(results: Results) -> str:
    """How many seeds, what the bars are, and what is missing."""
    all_runs = [run for runs in results.values() for run in runs]
    counts = {len([run for run in runs if "failed" not in run]) for runs in results.values()} - {0}
    low, high = min(counts, default=0), max(counts, default=0)
    seeds = f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"
    text = f"Mean of {seeds}; bars: standard deviation." if high > 1 else "One seed."
    text = text if high else "No result."
    failed = sum("failed" in run for run in all_runs)
    apart = sum("failed" not in run and diverged(run) for run in all_runs)
    missing = ", ".join(
        f"{count} of {len(all_runs)} runs {word}"
        for count, word in ((apart, "diverged"), (failed, "failed")) if count
    )  # fmt: skip
    return f"{text} {missing}." if missing else text


def draw(results: Results, points: Sequence[Point], path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending.

    Args:
        results: the runs of every point so far.
        points: all points, with runs and without.
    """
    key, *others = points[0].keys
    places = list(dict.fromkeys(point.values[0] for point in points))
    panels = {title: marks(results, name, places) for name, title in PANELS.items()}
    panels = {
        title: curves for title, curves in panels.items()
        if any(math.isfinite(mark.mean) for curve in curves.values() for mark in curve)
    }  # fmt: skip
    names = list(next(iter(panels.values()))) if panels else []
    legend = sum(len(textwrap.wrap(n, CAPTION - 12)) for n in names) * (len(names) > 1)
    height = 1.2 + 0.19 * legend + 1.75 * max(1, len(panels))
    with picture(path, WIDTH, height) as figure:
        if panels:
            grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
            for axes, (title, curves) in zip(grid, panels.items(), strict=True):
                axes.set_title(title)
                _draw_curves(axes, curves, places)
            grid[-1].set_xlabel(key)
            if len(names) > 1:
                _legend(figure, grid[0], ", ".join(others))
        text = "\n".join(textwrap.wrap(caption(results), CAPTION))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=GREY)


def _draw_curves(axes, curves: Mapping[str, list[Mark]], places: Sequence[str]) -> None:
    """Curves over numbers; over anything else, marks next to each other."""
    across = [_number(value) for value in places]
    numeric = all(map(math.isfinite, across)) and len(across) > 1
    for index, (name, curve) in enumerate(curves.items()):
        aside = 0.0
        if not numeric:
            across = list(range(len(places)))
            aside = 0.6 * ((index + 0.5) / len(curves) - 0.5)
        curve = sorted(curve, key=lambda mark: across[mark.at])
        known = any(mark.deviation is not None for mark in curve)
        axes.errorbar(
            [across[mark.at] + aside for mark in curve], [mark.mean for mark in curve],
            [mark.deviation or 0.0 for mark in curve] if known else None,
            label=name, linewidth=1.6, linestyle="-" if numeric else "none",
            color=COLORS[index % len(COLORS)], marker=MARKERS[index % len(MARKERS)],
            markersize=4.5, capsize=2.5, elinewidth=1,
        )  # fmt: skip
    if not numeric:
        labels = ["\n".join(textwrap.wrap(value, LABEL)) for value in places]
        axes.set_xticks(across, labels, rotation=30, ha="right", rotation_mode="anchor",
                        parse_math=False)  # fmt: skip
        axes.set_xlim(-0.5, len(places) - 0.5)
    elif min(across) > 0 and max(across) >= RANGE * min(across):
        axes.set_xscale("log")
        axes.minorticks_off()
    if numeric and len(across) <= 8:
        axes.set_xticks(across, [f"{x:g}" for x in across])
    axes.margins(x=0.06, y=0.12)


def _legend(figure, axes, title: str) -> None:
    handles, names = axes.get_legend_handles_labels()
    names = ["\n".join(textwrap.wrap(name, CAPTION - 12)) for name in names]
    figure.legend(
        handles, names, loc="outside upper left", frameon=False, fontsize=9, alignment="left",
        title=title, title_fontsize=9,
        ncols=2 if max(map(len, names)) < 20 else 1,
    )  # fmt: skip
