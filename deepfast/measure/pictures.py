"""The report's pictures, as SVG text for the page.

Sizes suit a phone: a picture is about as wide as its screen, so that letters stay readable there.
It grows on a wider screen.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepfast.memory.eager import RESIDUAL

COLORS = {
    "deepfast": "#0b6e4f",
    RESIDUAL: "#7a7a7a",
    "stack and sum": "#b3261e",
    "DenseFormer form": "#8250c4",
    "loop of adds": "#c77700",
}
WIDTH, HEIGHT = 4.3, 3.3
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deepfast",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

Curve = Sequence[tuple[float, float]]


def figure_of(width: float = WIDTH, height: float = HEIGHT):
    # Not pyplot: it would choose a display and keep figures alive.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def save(figure, path: Path) -> None:
    """Writes a picture as SVG or PNG, by the file's ending."""
    import matplotlib

    from deepfast.files import write_atomically

    # Without a date, the same command writes the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    picture = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            picture, format=path.suffix[1:], dpi=200, bbox_inches="tight", facecolor="white",
            metadata=metadata,
        )  # fmt: skip
    write_atomically(path, picture.getvalue())


def parts(names: Sequence[str], scores: Sequence[float | None], path: Path) -> None:
    """BLEU of the parts of a text as bars, a gap for None; SVG or PNG, by the file's ending."""
    figure, axes = figure_of(height=2.2)
    known = [(at, score) for at, score in enumerate(scores) if score is not None]
    bars = axes.bar(*zip(*known, strict=True), width=0.6, color=COLORS["deepfast"])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.12)
    axes.set_title("BLEU by the words of a source", loc="left", fontsize=10)
    save(figure, path)


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
    figure, axes, curves: Mapping[str, Curve], colors: dict[str, str], strong: Sequence[str] = ()
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
    colors: dict[str, str],
    *,
    title: str,
    strong: Sequence[str],
    dashed: Sequence[str] = (),
    line: tuple[str, float] | None = None,
    across: str = "encoder layers",
    unnamed: Sequence[str] = (),
    width: float = WIDTH,
    height: float = HEIGHT,
):
    """Numbers over depth on two logarithmic axes, one curve for each name of ``curves``.

    strong, dashed: names of thick and of broken curves.
    line: a name and a number, drawn as a horizontal line.
    across: the label of the horizontal axis, if it is not depth.
    unnamed: names of curves that are not written beside them.
    """
    figure, axes = figure_of(width, height)
    for name, points in curves.items():
        main = name in strong
        axes.plot(
            *zip(*points, strict=True), color=colors[name], marker="o",
            markersize=5 if main else 3.5, linewidth=2.4 if main else 1.4,
            zorder=3 if main else 2, linestyle="--" if name in dashed else "-",
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
    axes.set_title(title, loc="left", fontsize=10)
    if line is not None:
        axes.axhline(line[1], color="#555555", linestyle=":", linewidth=1)
        axes.annotate(
            line[0], (0.01, line[1]), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color="#555555", fontsize=8.5,
        )  # fmt: skip
    named = {name: points for name, points in curves.items() if name not in unnamed}
    label_ends(figure, axes, named, colors, strong)
    return figure


def over_depth(curves: Mapping[str, Curve], *, name: str, title: str, unit: str) -> str | None:
    """Numbers over depth, one curve for each variant, as SVG text."""
    curves = {v: sorted(points) for v, points in curves.items() if points}
    if not curves:
        return None
    figure = depth_figure(
        curves, COLORS, title=f"{title}, {unit}", strong=("deepfast",), dashed=(RESIDUAL,)
    )
    return inline(figure, name, f"{title} over encoder layers, all variants")


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, ... over the range of the values; fewer for a wide range."""
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high / max(low, 1e-12) < 1000 else (1,)
    every = [step * 10.0**power for power in range(-9, 10) for step in steps]
    below = [t for t in every if t <= low]
    above = [t for t in every if t >= high]
    return [t for t in every if below[-1] <= t <= above[0]]


def losses(runs: dict[str, dict], *, token_frequencies: float | None) -> str:
    """NLL over the steps of the trainings: lines for training batches, points for dev."""
    figure, axes = figure_of(WIDTH, 3.1)
    names = {"dlcl": "DLCL, pre-norm", "twin": "residual, post-norm"}
    colors = dict(zip(names.values(), (COLORS["deepfast"], COLORS["stack and sum"]), strict=True))
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 1, "alpha": 0.55},
        "dev": {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
    }
    ends: dict[str, Curve] = {}
    for key, run in runs.items():
        label, curve = names[key], run["curve"]
        for part, style in styles.items():
            if curve[part]:
                points = [(step, nll) for step, nll, _ in curve[part]]
                axes.plot(*zip(*points, strict=True), color=colors[label], **style)
                ends[label] = points
    if token_frequencies is not None:
        axes.axhline(token_frequencies, color="#555555", linestyle=":", linewidth=1)
        axes.annotate(
            "token frequencies alone", (0.99, token_frequencies), (0, 3),
            xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
            color="#555555", fontsize=8.5,
        )  # fmt: skip
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    axes.set_title("NLL, nats per target token", loc="left", fontsize=10)
    label_ends(figure, axes, ends, colors)
    return inline(figure, "losses", "Training and dev NLL over optimizer steps")


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


def depth_weights(weights: Sequence[Sequence[float]]) -> str:
    """Learned W as SVG text."""
    import numpy as np

    matrix = np.array(weights)
    hidden = np.triu(np.ones_like(matrix, dtype=bool), 1)
    figure, axes = figure_of(WIDTH, WIDTH * 0.8)
    mesh = heat_map(axes, matrix, hidden=hidden)
    figure.colorbar(mesh, ax=axes, shrink=0.7, pad=0.02, extend="both")
    return inline(figure, "weights", "Heat map of the learned depth weights")
