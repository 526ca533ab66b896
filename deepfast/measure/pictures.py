"""How every picture is drawn: one style, files and SVG text for pages, and curves over depth.

Sizes suit a phone: a picture is about as wide as its screen, so that letters stay readable there.
It grows on a wider screen.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.files import require, write_atomically
from deepfast.memory.eager import RESIDUAL

COLORS = {
    "deepfast": "#0b6e4f",
    RESIDUAL: "#7a7a7a",
    "stack and sum": "#b3261e",
    "DenseFormer form": "#8250c4",
    "loop of adds": "#c77700",
}
BLUE, GREY = "#2f6db5", "#555555"
WIDTH, HEIGHT = 4.3, 3.3
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deepfast",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Look:
    """How the curves of a picture look, by name."""

    colors: dict[str, str]
    strong: Sequence[str] = ()
    """Thick curves, with bold names."""
    dashed: Sequence[str] = ()
    unnamed: Sequence[str] = ()
    """Curves whose names are not written beside them."""


def new_figure(width: float, height: float):
    """An empty figure of that many inches."""
    # Not pyplot: it would choose a display and keep figures alive.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_of(width: float = WIDTH, height: float = HEIGHT):
    """A figure with one panel."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = new_figure(width, height)
        return figure, figure.add_subplot()


@contextlib.contextmanager
def picture(path: Path, width: float, height: float, **style: object) -> Iterator:
    """A figure to draw on, in inches; it is written to ``path`` at the end of the block.

    style: what differs from `STYLE`, by matplotlib's names with _ in place of the dots.
    """
    matplotlib = require("matplotlib", "drawing")
    changes = {name.replace("_", "."): value for name, value in style.items()}
    with matplotlib.rc_context(STYLE | changes):
        figure = new_figure(width, height)
        yield figure
    save(figure, path)


def set_title(axes, text: str) -> None:
    """The title of a panel."""
    axes.set_title(text, loc="left", fontsize=10)


def set_line(axes, name: str, value: float, *, right: bool = False) -> None:
    """A dotted horizontal line with a name at its left or right end."""
    axes.axhline(value, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        name, (0.99 if right else 0.01, value), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right" if right else "left", color=GREY, fontsize=8.5,
    )  # fmt: skip


def save(figure, path: Path) -> None:
    """Writes a picture as SVG or PNG, by the file's ending."""
    import matplotlib

    # Without a date, the same command writes the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    picture = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            picture, format=path.suffix[1:], dpi=200, bbox_inches="tight", facecolor="white",
            metadata=metadata,
        )  # fmt: skip
    write_atomically(path, picture.getvalue())


def inline(figure, name: str, title: str) -> str:
    """Text for use inside HTML: no prologue, its own ids, a title for screen readers."""
    import matplotlib

    text = io.StringIO()
    empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata=empty, bbox_inches="tight", pad_inches=0.04)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for pattern in (r'(\bid=")', r'(href="#)', r"(url\(#)"):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'^<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    head, _, rest = svg.partition(">")
    return f'{head} role="img" aria-label="{title}">{rest}'


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Positions near the wanted ones, each at least ``gap`` above the previous; ascending input."""
    places = list(wanted)
    for _ in range(200):
        moved = False
        for i in range(1, len(places)):
            lack = gap - (places[i] - places[i - 1])
            if lack > 1e-9:
                places[i] += lack / 2
                places[i - 1] -= lack / 2
                moved = True
        if not moved:
            break
    return places


def label_ends(
    figure, axes, curves: Mapping[str, Curve], colors: Mapping[str, str], strong: Sequence[str] = ()
) -> None:
    """Writes the name of each curve right of its last point, moved apart so that none touch."""
    figure.canvas.draw()
    to_pixels = axes.transData.transform
    ends = sorted((to_pixels(curve[-1])[1], name) for name, curve in curves.items() if curve)
    right = max(to_pixels(curve[-1])[0] for curve in curves.values() if curve)
    gap = figure.dpi * 12.5 / 72
    places = _spread([y for y, _ in ends], gap)
    for place, (_, name) in zip(places, ends, strict=True):
        x, y = to_pixels(curves[name][-1])
        back = axes.transData.inverted().transform
        anchor = back((max(right, x) + 8, place))
        axes.annotate(
            name, back((x, y)), anchor, color=colors[name], va="center", annotation_clip=False,
            fontweight="bold" if name in strong else "normal",
            arrowprops={"arrowstyle": "-", "color": colors[name], "lw": 0.5, "alpha": 0.6,
                        "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)},
        )  # fmt: skip


def depth_figure(
    curves: Mapping[str, Curve],
    look: Look,
    title: str,
    *,
    across: str = "encoder layers",
    line: tuple[str, float] | None = None,
    size: tuple[float, float] = (WIDTH, HEIGHT),
):
    """Numbers over depth on two logarithmic axes, one curve for each name of ``curves``.

    across: the label of the horizontal axis, if it is not depth.
    line: a name and a number, drawn as a horizontal line.
    """
    figure, axes = figure_of(*size)
    for name, points in curves.items():
        main = name in look.strong
        axes.plot(
            *zip(*points, strict=True), color=look.colors[name], marker="o",
            markersize=5 if main else 3.5, linewidth=2.4 if main else 1.4,
            zorder=3 if main else 2, linestyle="--" if name in look.dashed else "-",
        )  # fmt: skip
    depths = sorted({x for points in curves.values() for x, _ in points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(depths, [f"{d:g}" for d in depths])
    axes.minorticks_off()
    axes.set_xlim(depths[0] * 0.85, depths[-1] * 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(_ticks([y for points in curves.values() for _, y in points]))
    axes.set_xlabel(across)
    set_title(axes, title)
    if line is not None:
        set_line(axes, *line)
    named = {name: points for name, points in curves.items() if name not in look.unnamed}
    label_ends(figure, axes, named, look.colors, look.strong)
    return figure


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, ... over the range of the values; fewer for a wide range."""
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high / max(low, 1e-12) < 1000 else (1,)
    every = [step * 10.0**power for power in range(-9, 10) for step in steps]
    below = [t for t in every if t <= low]
    above = [t for t in every if t >= high]
    return [t for t in every if below[-1] <= t <= above[0]]


def heat_map(axes, matrix, *, hidden, limit: float | None = None):
    """Depth weights: rows are layers, columns the sources they read, colours centred at zero.
    Returns what a colour bar needs.

    Args:
        matrix: (L+1, L+1) array.
        hidden: bool array of that shape, True where no colour is drawn. A hidden weight is grey if
            the row may read its source.
        limit: the weight of the strongest colour; None: only 3% of the weights exceed it.
    """
    import numpy as np

    count = len(matrix)
    if limit is None:
        # The first rows have few sources and large weights: they would leave no colour for the
        # others.
        limit = float(np.quantile(np.abs(matrix[~hidden]), 0.97)) or 1.0
    lines = {"edgecolors": "white", "linewidth": 0.25 if count <= 60 else 0.0}
    readable = np.tril(np.ones_like(matrix, dtype=bool))
    if (readable & hidden).any():
        axes.pcolormesh(
            np.ma.masked_array(np.zeros_like(matrix), ~(readable & hidden)), cmap="Greys",
            vmin=-0.14, vmax=1, **lines,
        )  # fmt: skip
    mesh = axes.pcolormesh(
        np.ma.masked_array(matrix, hidden), cmap="RdBu_r", vmin=-limit, vmax=limit, **lines
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.grid(False)
    last = count - 1
    step = 1 if count <= 8 else 5 if count <= 60 else 10
    # The output's row has a name, which needs room.
    ticks = [i for i in range(0, last, step) if last - i > step / 3] + [last]
    axes.set_xticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
    axes.set_yticks([t + 0.5 for t in ticks], [*(str(t + 1) for t in ticks[:-1]), "output"])
    axes.set_xlabel("source: 0 is the embedding, k the output of layer k")
    axes.set_ylabel("input of layer")
    return mesh


def parts(names: Sequence[str], scores: Sequence[float | None], path: Path) -> None:
    """BLEU of the parts of a text as bars, a gap for None; SVG or PNG, by the file's ending."""
    figure, axes = figure_of(height=2.2)
    known = [(at, score) for at, score in enumerate(scores) if score is not None]
    bars = axes.bar(*zip(*known, strict=True), width=0.6, color=COLORS["deepfast"])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.12)
    set_title(axes, "BLEU by the words of a source")
    save(figure, path)
