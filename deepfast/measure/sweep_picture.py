"""The pictures of a sweep: dev NLL and BLEU of each point, and dev NLL over steps and time.

Where the values of the first key are numbers, they lie on an axis, with a curve for each other
combination and error bars of the standard deviation. Anything else, such as names of systems, has a
line for each point, a mark for each seed, and the mean.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.files import write_atomically
from deepfast.measure.pictures import GREY, WIDTH, picture
from deepfast.mt.sweep.grid import Pilots, Point
from deepfast.mt.sweep.runs import Result
from deepfast.mt.sweep.table import Results, diverged, known, page

PANELS = {"test_bleu": "BLEU", "nll": "dev NLL, nats"}
"""What a run's result has -> the title of its panel."""
COLORS = ("#0b6e4f", "#d55e00", "#0072b2", "#e69f00", "#b8548f", "#7a7a7a", "#56b4e9", "#000000")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")
RANGE = 8
"""Numbers whose largest is this many times the smallest are on a logarithmic axis."""
LABEL, CAPTION = 22, 68
"""Letters of a line below the axis, and of the caption."""


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


def caption(results: Results, numeric: bool) -> str:
    """How many seeds, how they are drawn, and what is missing."""
    all_runs = [run for runs in results.values() for run in runs]
    counts = {len([run for run in runs if "failed" not in run]) for runs in results.values()} - {0}
    low, high = min(counts, default=0), max(counts, default=0)
    seeds = f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"
    drawn = "bars: standard deviation" if numeric else "each seed a circle"
    text = f"Mean of {seeds}; {drawn}." if high > 1 else "One seed."
    text = text if high else "No result."
    failed = sum("failed" in run for run in all_runs)
    apart = sum("failed" not in run and diverged(run) for run in all_runs)
    missing = ", ".join(
        f"{count} of {len(all_runs)} runs {word}"
        for count, word in ((apart, "diverged"), (failed, "failed"))
        if count
    )
    return f"{text} {missing}." if missing else text


def write_page(
    folder: Path,
    results: Results,
    command: str,
    pilots: Pilots | None,
    tried: Mapping[Point, Mapping[Point, Result]],
) -> None:
    """Writes the page of a sweep and its pictures into its folder, see `page`."""
    text = page(results, command, pilots, tried)
    write_atomically(folder / "sweep.md", text.encode())
    draw(results, list(results), folder / "sweep.svg")
    draw_learning(results, folder / "sweep_curves.svg")


def draw(results: Results, points: Sequence[Point], path: Path) -> None:
    """Writes the picture of the values as SVG or PNG, by the file's ending.

    Args:
        results: the runs of every point so far.
        points: all points, with runs and without. The first is the baseline.
    """
    panels = {
        name: title
        for name, title in PANELS.items()
        if any(known(runs, name) for runs in results.values())
    }
    places = list(dict.fromkeys(point.values[0] for point in points))
    across = [_number(value) for value in places]
    numeric = len(across) > 1 and all(map(math.isfinite, across))
    curves = {name: marks(results, name, places) for name in panels} if numeric else {}
    names = list(next(iter(curves.values()), ()))
    legend = sum(len(textwrap.wrap(n, CAPTION - 12)) for n in names) * (len(names) > 1)
    height = 1.2 + 0.19 * legend + 1.75 * len(panels) if numeric else 1.1 + 0.3 * len(points)
    with picture(path, WIDTH, height) as figure:
        if numeric and panels:
            grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
            for axes, (name, title) in zip(grid, panels.items(), strict=True):
                axes.set_title(title)
                _draw_curves(axes, curves[name], across)
            grid[-1].set_xlabel(points[0].keys[0])
            if len(names) > 1:
                _legend(figure, grid[0], ", ".join(points[0].keys[1:]))
        elif panels:
            grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
            for axes, (name, title) in zip(grid, panels.items(), strict=True):
                axes.set_title(title)
                _draw_lines(axes, [known(results.get(point, ()), name) for point in points])
            labels = ["\n".join(textwrap.wrap(", ".join(p.values), LABEL)) for p in points]
            grid[0].set_yticks(range(len(points)), labels, parse_math=False)
            grid[0].invert_yaxis()
        text = "\n".join(textwrap.wrap(caption(results, numeric), CAPTION))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=GREY)


def draw_learning(results: Results, path: Path, time: str = "minutes") -> None:
    """Writes the picture of dev NLL over steps and over time: each run thin, the mean thick. The
    time of a step is the median of the runs' medians.

    Args:
        time: what 60 of the seconds in ``step_seconds`` of a result are called.
    """
    with picture(path, WIDTH, 1.1 + 0.1 * len(results) + 4.4) as figure:
        grid = figure.subplots(2, 1)
        looks = _looks(results)
        for point, runs in results.items():
            runs = [run for run in runs if run.get("curve") and run.get("step_seconds")]
            if not runs:
                continue
            color, style = looks[point]
            curves = [
                [(step, math.nan if nll is None else nll) for step, nll in run["curve"]]
                for run in runs
            ]
            length = min(map(len, curves))
            steps = [step for step, _ in curves[0][:length]]
            mean = [statistics.mean(curve[at][1] for curve in curves) for at in range(length)]
            minutes = statistics.median(run["step_seconds"] for run in runs) / 60
            for axes, scale in zip(grid, (1.0, minutes), strict=True):
                for curve in curves:
                    axes.plot([scale * step for step, _ in curve], [nll for _, nll in curve],
                              color=color, linewidth=0.5, alpha=0.6)  # fmt: skip
                axes.plot([scale * step for step in steps], mean, color=color, linewidth=1.7,
                          linestyle=style, label=", ".join(point.values))  # fmt: skip
        for axes, label in zip(grid, ("optimizer steps", time), strict=True):
            axes.set_xlabel(label)
            axes.set_xlim(0)
        grid[0].set_title("dev NLL, nats")
        _legend(figure, grid[0], ", ".join(next(iter(results)).keys))


def _looks(results: Results) -> dict[Point, tuple[str, str]]:
    """Colour and line of each point: "DLCL, 6 layers" has the colour of "DLCL, 30 layers" and the
    line of "pre-norm, 6 layers"."""
    parts = {}
    for point in results:
        before, _, last = ", ".join(point.values).rpartition(", ")
        parts[point] = (before, last) if before else (last, "")
    first, second = ([*dict.fromkeys(found)] for found in zip(*parts.values(), strict=True))
    looks = {}
    for point, (a, b) in parts.items():
        again, color = divmod(first.index(a), len(COLORS))
        looks[point] = COLORS[color], LINES[(second.index(b) + again) % len(LINES)]
    return looks


def _draw_lines(axes, values: Sequence[Sequence[float]]) -> None:
    """A line for each point: a mark for each value, and a longer one for their mean."""
    for at, own in enumerate(values):
        color = GREY if at == 0 else COLORS[0]
        axes.plot(own, [at] * len(own), "o", color=color, markersize=4.5, fillstyle="none")
        if own:
            mean = statistics.mean(own)
            axes.plot([mean], [at], "|", color=color, markersize=13, markeredgewidth=2)
    if values and values[0]:
        axes.axvline(statistics.mean(values[0]), color=GREY, linestyle=":", linewidth=1)
    axes.margins(x=0.08)
    axes.set_ylim(-0.6, len(values) - 0.4)


def _draw_curves(axes, curves: Mapping[str, list[Mark]], across: Sequence[float]) -> None:
    """Curves over numbers."""
    for index, (name, curve) in enumerate(curves.items()):
        curve = sorted(curve, key=lambda mark: across[mark.at])
        bars = any(mark.deviation is not None for mark in curve)
        axes.errorbar(
            [across[mark.at] for mark in curve], [mark.mean for mark in curve],
            [mark.deviation or 0.0 for mark in curve] if bars else None,
            label=name, linewidth=1.6, color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)], markersize=4.5, capsize=2.5, elinewidth=1,
        )  # fmt: skip
    if min(across) > 0 and max(across) >= RANGE * min(across):
        axes.set_xscale("log")
        axes.minorticks_off()
    if len(across) <= 8:
        axes.set_xticks(across, [f"{x:g}" for x in across])
    axes.margins(x=0.06, y=0.12)


def _legend(figure, axes, title: str) -> None:
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    names = ["\n".join(textwrap.wrap(name, CAPTION - 12)).replace("$", r"\$") for name in names]
    figure.legend(
        handles, names, loc="outside upper left", frameon=False, fontsize=9, alignment="left",
        title=title, title_fontsize=9,
        ncols=2 if max(map(len, names)) < 20 else 1,
    )  # fmt: skip
