"""The five figures of docs/results.md, each for a light page and for a dark one."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from deepfast.measure.forms import STACK
from deepfast.measure.pictures import BLUE, COLORS, GREEN, GREY, picture

RED = COLORS[STACK]
DARK = {
    "text_color": "#c9d1d9", "axes_edgecolor": "#8b949e", "axes_labelcolor": "#c9d1d9",
    "xtick_color": "#c9d1d9", "ytick_color": "#c9d1d9", "grid_color": "#30363d",
}  # fmt: skip


def both(path: Path):
    """The two files of a figure, and the style of each."""
    return (path, {}), (path.with_stem(f"{path.stem}_dark"), DARK)


def curves(path: Path, title: str, found: Mapping[str, Mapping[int, float]]) -> None:
    """Numbers over layers; what computes each row for itself, or compiles it, is dashed."""
    for file, style in both(path) if found else ():
        with picture(file, ground="none", **style) as figure:
            axes = figure.add_subplot()
            for name, points in found.items():
                kind, _, connection = name.partition(": ")
                blue = "attention" in connection
                color = GREY if not connection else BLUE if blue else GREEN
                color = RED if kind in ("stack and sum", "compiled loop") else color
                axes.plot(
                    list(points), list(points.values()), color=color, label=name, marker="o",
                    markersize=4, linewidth=2.4 if kind == "deepfast" else 1.4,
                    linestyle="--" if kind in ("per row", "compiled loop") else "-",
                )  # fmt: skip
            axes.set_title(title)
            axes.set_xlabel("layers")
            axes.set_xticks(sorted({x for points in found.values() for x in points}))
            axes.set_ylim(0)
            figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)


def dots(path: Path, panels: Mapping[str, Mapping[str, list[float]]], line: float | None) -> None:
    """A line for each name, with a circle for each value and a bar at their mean, a panel for each
    title. A dotted line is at ``line``, or at the mean of the first name."""
    names = list(next(iter(panels.values()), ()))
    if not names:
        return
    for file, style in both(path):
        with picture(file, 5.2, 1.0 + 0.24 * len(names), ground="none", **style) as figure:
            grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
            for axes, (title, values) in zip(grid, panels.items(), strict=True):
                axes.set_title(title)
                for at, found in enumerate(values.values()):
                    axes.plot(found, [at] * len(found), "o", color=GREEN, markersize=4,
                              fillstyle="none")  # fmt: skip
                    if len(found) > 1:
                        axes.plot([statistics.mean(found)], [at], "|", color=GREEN, markersize=12)
                where = statistics.mean(values[names[0]]) if line is None else line
                axes.axvline(where, color=GREY, linestyle=":", linewidth=1)
            grid[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
            grid[0].set_ylim(len(names) - 0.4, -0.6)
