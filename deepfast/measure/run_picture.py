"""A training run as a picture: NLL and accuracy over the steps, and gradient norms by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepfast.measure.pictures import COLORS, WIDTH, Curve, picture

PANELS = {"nll": "NLL, nats per target token", "accuracy": "token accuracy"}
"""A key of a line of metrics -> the title of its panel."""
EVENTS = {"train": "train", "valid": "dev"}
"""Event of a line of metrics -> the name of its curve."""
CURVES: dict[str, dict[str, Any]] = {
    "train": {"color": COLORS["stack and sum"]},
    "dev": {"color": COLORS["deepfast"], "marker": "o", "markersize": 3},
}
"""How a curve looks."""
NORM = "grad_norm_"
PANEL, LAYER, MOST_LAYERS = 1.9, 0.04, 3.0
"""Inches of a panel, and what each layer adds to it, up to a limit."""


@dataclass(frozen=True)
class SideNorms:
    """The gradient norms of one side's layers."""

    name: str
    start: int
    """The step of the line of metrics before the first norms; 0 without one."""
    steps: list[int]
    norms: list[list[float]]
    """For each step the norms of the layers from the first to the last; NaN without a gradient."""


def check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Refuses lines that no run has written.

    Raises:
        ValueError: names the line's step, the key, what was expected and got.
    """
    layers: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            if key == "step":
                right, expected = type(value) is int and 0 <= value < 2**63, "an integer"
            elif key in PANELS:
                right, expected = value is None or _is_number(value), "a number or null"
            elif key.startswith(NORM) and isinstance(value, list):
                count = layers.setdefault(key, len(value))
                right = len(value) == count and count > 0
                right = right and all(x is None or (_is_number(x) and x >= 0) for x in value)
                expected = f"norms of {count or 'the'} layers"
            else:
                continue
            if not right:
                raise ValueError(
                    f"metrics.jsonl: expected {expected} for {key} in the line of step "
                    f"{row['step']}, got {value!r}"
                )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def curves(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Curve]:
    """The values of ``key`` over the steps, by curve; without curves of no value."""
    found = {
        name: [(r["step"], r[key]) for r in rows if r["event"] == event and r.get(key) is not None]
        for event, name in EVENTS.items()
    }
    return {name: curve for name, curve in found.items() if curve}


def side_norms(rows: Sequence[dict[str, Any]]) -> list[SideNorms]:
    """The gradient norms of each side that has layers."""
    kept = [row for row in rows if row["event"] == "train"]
    names = dict.fromkeys(
        key
        for row in kept
        for key, value in row.items()
        if key.startswith(NORM) and isinstance(value, list)
    )
    sides = []
    for key in names:
        own = [(row["step"], row[key]) for row in kept if isinstance(row.get(key), list)]
        norms = [[math.nan if x is None else x for x in values] for _, values in own]
        steps = [step for step, _ in own]
        start = max((row["step"] for row in kept if row["step"] < steps[0]), default=0)
        sides.append(SideNorms(key.removeprefix(NORM), start, steps, norms))
    return sides


def table(side: SideNorms) -> list[str]:
    """A line for each layer: its norm at the first, the middle and the last step."""
    places = sorted({0, len(side.steps) // 2, len(side.steps) - 1})
    head = "".join(f"{f'step {side.steps[at]}':>14}" for at in places)
    lines = [f"{side.name + ' layer':<16}{head}"]
    for layer in range(len(side.norms[0])):
        cells = (side.norms[at][layer] for at in places)
        lines.append(f"{layer + 1:<16}" + "".join(f"{x:>14.3g}" for x in cells))
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending."""
    lines = {title: found for key, title in PANELS.items() if (found := curves(rows, key))}
    sides = side_norms(rows)
    if not lines and not sides:
        raise ValueError("expected lines of metrics with values to draw, got none")
    heights = [PANEL] * len(lines)
    heights += [PANEL + min(LAYER * len(side.norms[0]), MOST_LAYERS) for side in sides]
    with picture(path, 1.4 * WIDTH, sum(heights)) as figure:
        grid = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
        panels = iter(grid[:, 0])
        for title, found in lines.items():
            axes = next(panels)
            for name, curve in found.items():
                axes.plot(*zip(*curve, strict=True), label=name, linewidth=1.4, **CURVES[name])
            axes.set_title(title)
            axes.legend(frameon=False, fontsize=9)
        for side in sides:
            _draw_norms(figure, next(panels), side)
        grid[-1, 0].set_xlabel("optimizer steps")


def _draw_norms(figure, axes, side: SideNorms) -> None:
    """Colours over steps and layers: layer 1, at the embedding, is at the bottom."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    norms = np.array(side.norms).T
    # On a logarithmic scale 0 has no place: a layer that was left out has no colour.
    shown = np.ma.masked_where(~(norms > 0), norms)
    # Each column ends where the next one begins, so its line of metrics stands at its end.
    edges = [side.start, *side.steps]
    scale = LogNorm(shown.min(), shown.max()) if shown.count() else None
    mesh = axes.pcolormesh(edges, np.arange(len(norms) + 1) + 0.5, shown, norm=scale)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.grid(False)
    axes.set_ylabel("layer")
    axes.set_title(f"gradient norm by layer: {side.name}")
    figure.colorbar(mesh, ax=axes, pad=0.02)
