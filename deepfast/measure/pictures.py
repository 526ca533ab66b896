"""How every picture is drawn: one style, files and SVG text for pages, curves and heat maps.

Sizes suit a phone: a picture is about as wide as its screen, so that letters stay readable there.
It grows on a wider screen.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from deepfast.files import require, write_atomically
from deepfast.measure.encoders import RESIDUAL

# Apart for colour-blind readers too: most are of Okabe and Ito.
COLORS = {
    "deepfast": "#0b6e4f",
    RESIDUAL: "#7a7a7a",
    "stack and sum": "#d55e00",
    "DenseFormer form": "#b8548f",
    "loop of adds": "#b8860b",
    "compiled loop": "#0072b2",
}
BLUE, GREY = "#0072b2", "#555555"
WIDTH, HEIGHT = 4.3, 3.3
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deepfast",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
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


@contextlib.contextmanager
def styled(**changes: object) -> Iterator[None]:
    """The style of every picture that is drawn and written in the block.

    changes: what differs from `STYLE`, by matplotlib's names with _ in place of the dots.
    """
    matplotlib = require("matplotlib", "drawing")
    own = {name.replace("_", "."): value for name, value in changes.items()}
    with matplotlib.rc_context(STYLE | own):
        yield


def new_figure(width: float = WIDTH, height: float = HEIGHT):
    """An empty figure of that many inches."""
    # Not pyplot: it would choose a display and keep figures alive.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@contextlib.contextmanager
def picture(
    path: Path, width: float = WIDTH, height: float = HEIGHT, *, ground: str = "white",
    **changes: object,
) -> Iterator[Any]:  # fmt: skip
    """A figure to draw on, in inches; at the end of the block it is written to ``path`` as SVG or
    PNG, by the file's ending. ``ground`` is the colour behind it, ``changes`` as in `styled`."""
    with styled(**changes):
        figure = new_figure(width, height)
        yield figure
        # Without a date, the same command writes the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        content = io.BytesIO()
        figure.savefig(
            content, format=path.suffix[1:], dpi=200, bbox_inches="tight", facecolor=ground,
            metadata=metadata,
        )  # fmt: skip
    write_atomically(path, content.getvalue())


def inline(figure, name: str, title: str) -> str:
    """Text for use inside HTML: no prologue, its own ids, a title for screen readers."""
    text = io.StringIO()
    empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=empty, bbox_inches="tight", pad_inches=0.04)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head, _, rest = svg.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{rest}'


def line_at(axes, name: str, value: float, *, right: bool = False) -> None:
    """A dotted horizontal line with a name at its left or right end."""
    axes.axhline(value, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        name, (0.99 if right else 0.01, value), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right" if right else "left", color=GREY, fontsize=8.5,
    )  # fmt: skip


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Positions near the wanted ones, each at least ``gap`` above the previous; ascending input."""
    up = list(accumulate(wanted, lambda below, y: max(y, below + gap)))
    down = list(accumulate(reversed(wanted), lambda above, y: min(y, above - gap)))
    # Both keep the gaps, and so does their mean, which moves a group up as much as down.
    return [(low + high) / 2 for low, high in zip(reversed(down), up, strict=True)]


def label_ends(axes, curves: Mapping[str, Curve], look: Look) -> None:
    """Writes the name of each curve right of its last point, moved apart so that none touch."""
    axes.figure.canvas.draw()
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    ends = sorted(
        (*reversed(to_pixels(curve[-1])), name)
        for name, curve in curves.items()
        if curve and name not in look.unnamed
    )
    right = max(x for _, x, _ in ends)
    places = _spread([y for y, _, _ in ends], gap=axes.figure.dpi * 12.5 / 72)
    for place, (y, x, name) in zip(places, ends, strict=True):
        axes.annotate(
            name, to_data((x, y)), to_data((right + 8, place)), color=look.colors[name],
            va="center", annotation_clip=False,
            fontweight="bold" if name in look.strong else "normal",
            arrowprops={"arrowstyle": "-", "color": look.colors[name], "lw": 0.5, "alpha": 0.6,
                        "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)},
        )  # fmt: skip


def over_depth(
    axes, curves: Mapping[str, Curve], look: Look, across: str = "encoder layers", *,
    log: bool = False,
) -> None:  # fmt: skip
    """Numbers over depth on axes from zero, one curve for each name of ``curves``.

    Args:
        across: the label of the horizontal axis, if it is not depth.
        log: for numbers of a thousandfold range, two logarithmic axes.
    """
    for name, points in curves.items():
        main = name in look.strong
        axes.plot(
            *zip(*points, strict=True), color=look.colors[name], marker="o",
            markersize=5 if main else 3.5, linewidth=2.4 if main else 1.4,
            zorder=3 if main else 2, linestyle="--" if name in look.dashed else "-",
        )  # fmt: skip
    depths = sorted({x for points in curves.values() for x, _ in points})
    axes.set_xlabel(across)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xlim(depths[0] * 0.85, depths[-1] * 1.05)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(_ticks([y for points in curves.values() for _, y in points]))
    else:
        axes.set_xlim(0, depths[-1] * 1.02)
        axes.set_ylim(0)
    axes.set_xticks(depths, [f"{d:g}" for d in depths])
    label_ends(axes, curves, look)


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, ... over the range of the values; fewer for a wide range."""
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high / max(low, 1e-12) < 1000 else (1,)
    every = [step * 10.0**power for power in range(-9, 10) for step in steps]
    below = [t for t in every if t <= low]
    above = [t for t in every if t >= high]
    return [t for t in every if below[-1] <= t <= above[0]]


def heat(axes, values, **options: Any):
    """A rectangle of colour for each number of a matrix, the first row above; none where it is
    masked. Returns what a colour bar needs.

    options: of matplotlib's pcolormesh, such as cmap, vmin and vmax.
    """
    few = max(values.shape) <= 60
    mesh = axes.pcolormesh(values, edgecolors="white", linewidth=0.3 * few, **options)
    axes.grid(False)
    axes.set_ylim(len(values), 0)
    return mesh


def weight_map(axes, matrix, *, hidden, limit: float | None = None):
    """Depth weights: rows are layers, columns the sources they read, colours centred at zero.
    Returns what a colour bar needs.

    Args:
        matrix: (L+1, L+1) array.
        hidden: bool array of that shape, True where no colour is drawn. A hidden weight is grey if
            the row may read its source.
        limit: the weight of the strongest colour; None: only 3% of the weights exceed it.
    """
    import numpy as np

    if limit is None:
        # The first rows have few sources and large weights: they would leave no colour for the
        # others.
        limit = float(np.quantile(np.abs(matrix[~hidden]), 0.97)) or 1.0
    readable = np.tril(np.ones_like(matrix, dtype=bool))
    if (readable & hidden).any():
        grey = np.ma.masked_array(np.zeros_like(matrix), ~(readable & hidden))
        heat(axes, grey, cmap="Greys", vmin=-0.14, vmax=1)
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
    return mesh
