"""How every picture is drawn: one style, lines over depth, heat maps, and files of SVG or PNG.

Sizes suit a phone: a picture is about as wide as its screen, so that letters stay readable there.
It grows on a wider screen.
"""

import contextlib
import io
import re
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepfast.files import require, write_atomically
from deepfast.measure.forms import COMPILED, DENSEFORMER, LOOP, RESIDUAL, STACK

# Most are of Okabe and Ito, and colour-blind readers can tell them apart. The contrast of each is
# at least 3 on a white page and on a dark one.
GREEN, BLUE, GREY = "#118a63", "#1a7fc0", "#7a7a7a"
COLORS = {
    RESIDUAL: GREY,
    "deepfast": GREEN,
    STACK: "#d55e00",
    DENSEFORMER: "#b8548f",
    LOOP: "#b8860b",
    COMPILED: BLUE,
}
INK, GRID = "#555555", "#e4e4e4"
THEMES = (
    f"<style>svg {{ color: {INK}; --line: {GRID}; }} text {{ fill: currentColor; }} "
    "@media (prefers-color-scheme: dark) { svg { color: #c9d1d9; --line: #30363d; } }</style>"
)
"""The colours of a picture on a light page and on a dark one."""
WIDTH, HEIGHT = 4.3, 3.5
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deepfast",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}

Curves = Mapping[str, Mapping[float, float] | Sequence[tuple[float, float]]]


@contextlib.contextmanager
def drawing(width: float = WIDTH, height: float = HEIGHT, **changes: object) -> Iterator[Any]:
    """An empty figure of that many inches. What is drawn and written in the block has the style.

    changes: what differs from `STYLE`, by matplotlib's names with _ in place of the dots.
    """
    matplotlib = require("matplotlib", "drawing")
    # Not pyplot: it would choose a display and keep figures alive.
    from matplotlib.figure import Figure

    own = {name.replace("_", "."): value for name, value in changes.items()}
    with matplotlib.rc_context(STYLE | own):
        yield Figure(figsize=(width, height), layout="constrained")


@contextlib.contextmanager
def picture(path: Path, width: float = WIDTH, height: float = HEIGHT) -> Iterator[Any]:
    """A figure to draw on, see `drawing`; at the end of the block it is written to ``path`` as SVG
    or PNG, by the file's ending."""
    with drawing(width, height) as figure:
        yield figure
        # Without a date, the same command writes the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        content = io.BytesIO()
        figure.savefig(
            content, format=path.suffix[1:], dpi=200, bbox_inches="tight", metadata=metadata
        )
    write_atomically(path, content.getvalue())


def inline(figure, name: str, title: str, style: str = "") -> str:
    """SVG text for use inside HTML: its own ids, a title for screen readers, and the page's colours
    for letters, axes and grid. With the rules of `THEMES` it is a file, which keeps its size."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", pad_inches=0.04)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--line)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head, _, rest = svg.partition(">")
    if not style:
        head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{style}{rest}'


def over_depth(
    axes, curves: Curves, colors: Mapping[str, str], *, across: str = "encoder layers",
    strong: Container[str] = (), dashed: Container[str] = (), log: bool = False,
) -> None:  # fmt: skip
    """Numbers over depth on axes from zero, one curve for each name, and a legend below.

    Args:
        colors: of each name.
        across: the label of the horizontal axis, if it is not depth.
        strong: names of thick curves.
        dashed: names of broken curves.
        log: for numbers of a thousandfold range, two logarithmic axes.
    """
    for name, points in curves.items():
        main, found = name in strong, dict(points)
        axes.plot(
            list(found), list(found.values()), label=name, color=colors[name], marker="o",
            markersize=5 if main else 3.5, linewidth=2.4 if main else 1.4,
            zorder=3 if main else 2, linestyle="--" if name in dashed else "-",
        )  # fmt: skip
    depths = sorted({x for points in curves.values() for x in dict(points)})
    axes.set_xlabel(across)
    if log:
        from matplotlib.ticker import LogLocator

        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_xlim(0, depths[-1] * 1.02)
        axes.set_ylim(0)
    axes.set_xticks(depths, [f"{d:g}" for d in depths])
    axes.figure.legend(loc="outside lower left", ncols=2)


def dots(figure, panels: Mapping[str, Mapping[str, Sequence[float]]], at: float | None = None):
    """A panel for each title, in it a line for each name with a circle for each value and a bar at
    their mean. A dotted line is at ``at``, or at the mean of the first name, which is grey."""
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        axes.set_title(title)
        axes.margins(x=0.08)
        for y, values in enumerate(lines.values()):
            color = GREY if at is None and y == 0 else GREEN
            axes.plot(values, [y] * len(values), "o", color=color, markersize=4, fillstyle="none")
            if len(values) > 1:
                mean = statistics.mean(values)
                axes.plot([mean], [y], "|", color=color, markersize=12, markeredgewidth=1.5)
        first = next(iter(lines.values()))
        where = statistics.mean(first) if at is None and first else at
        if where is not None:
            axes.axvline(where, color=GREY, linestyle=":", linewidth=1)
    grid[0].set_yticks(range(len(lines)), lines, fontsize=8, parse_math=False)
    grid[0].set_ylim(len(lines) - 0.4, -0.6)


def line_at(axes, name: str, value: float) -> None:
    """A dotted horizontal line with a name at its left end."""
    axes.axhline(value, color=INK, linestyle=":", linewidth=1)
    axes.annotate(
        name, (0.01, value), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", color=INK, fontsize=8.5,
    )  # fmt: skip


def heat(axes, values, **options: Any):
    """A rectangle of colour for each number of a matrix, the first row above; none where it is
    masked. Returns what a colour bar needs.

    options: of matplotlib's pcolormesh, such as cmap, vmin and vmax.
    """
    # Edges of the same colour close the seams between rectangles.
    mesh = axes.pcolormesh(values, edgecolors="face", linewidth=0.3, **options)
    axes.grid(False)
    axes.set_ylim(len(values), 0)
    return mesh


def weight_map(axes, matrix, hidden) -> None:
    """Depth weights: rows are layers, columns the sources they read, colours centred at zero.

    Args:
        matrix: (L+1, L+1) array.
        hidden: bool array of that shape, True where no colour is drawn. A hidden weight is grey if
            the row may read its source.
    """
    import numpy as np

    # The first rows have few sources and large weights: they would leave no colour for the others.
    limit = float(np.quantile(np.abs(matrix[~hidden]), 0.97)) or 1.0
    grey = np.tril(hidden)
    if grey.any():
        zeros = np.ma.masked_array(np.zeros_like(matrix), ~grey)
        heat(axes, zeros, cmap="Greys", vmin=-0.14, vmax=1)
    shown = np.ma.masked_array(matrix, hidden)
    mesh = heat(axes, shown, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set_aspect("equal")
    last = len(matrix) - 1
    step = 1 if last < 8 else 5 if last < 60 else 10
    # The output's row has a name, which needs room.
    ticks = [i for i in range(0, last, step) if last - i > step / 3] + [last]
    axes.set_xticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
    axes.set_yticks([t + 0.5 for t in ticks], [*(str(t + 1) for t in ticks[:-1]), "output"])
    axes.set_xlabel("source: 0 is the embedding, k the output of layer k")
    axes.set_ylabel("input of layer")
    axes.figure.colorbar(mesh, ax=axes, shrink=0.7, pad=0.02, extend="both")
