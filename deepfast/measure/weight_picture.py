"""The depth weights of a model, as a picture and as a table.

As in Wang et al. 2019, Figure 5, small weights are left out: those under 0.1 in magnitude, or under
5% of the largest of their row. In a row without any weight of 0.1, such as an average over many
layers, only the 5% counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from deepfast.files import require
from deepfast.measure.choice_picture import SideChoices, draw_choices
from deepfast.measure.pictures import COLORS, GREY, HEIGHT, WIDTH, heat_map, picture, set_title
from deepfast.mt.models.interface import SearchModel
from deepfast.nn import AttentionResiduals

THRESHOLD, SMALL_OF_ROW = 0.1, 0.05
STRONGEST = 4
"""How many sources of a row the table names: as many as fit a terminal of 80 columns."""


@dataclass(frozen=True)
class SideWeights:
    """The applied W of the encoder or the decoder, or the mean weights of attention residuals."""

    name: str
    matrix: Tensor
    """(L+1, L+1): masked to the pattern and softmaxed if the DLCL does so; with several weights per
    pair of layers, their mean over channels."""
    note: str
    """What was averaged, or empty."""
    threshold: float = THRESHOLD
    """Weights below this magnitude are left out; 0 shows all."""

    @property
    def title(self) -> str:
        """The title in pictures and tables."""
        return f"{self.name}{f', {self.note}' if self.note else ''}"

    @property
    def hidden(self) -> Tensor:
        """(L+1, L+1) bool: the weight is small, or the row cannot read the source."""
        size = self.matrix.abs()
        small = (size < self.threshold) & ~self.by_own_scale.unsqueeze(1)
        if self.threshold > 0:
            small |= size < SMALL_OF_ROW * size.amax(1, keepdim=True)
        return small | torch.ones_like(small).triu(1)

    @property
    def by_own_scale(self) -> Tensor:
        """(L+1,) bool: rows without a weight that reaches the threshold."""
        return (self.matrix.abs() < self.threshold).all(1)

    @property
    def count(self) -> int:
        """The number of pairs of a layer and a source that it may read."""
        return len(self.matrix) * (len(self.matrix) + 1) // 2

    @property
    def caption(self) -> str:
        """How many weights were left out, and why."""
        if self.threshold == 0:
            return f"all {self.count:,} weights are shown"
        left = self.count - int((~self.hidden).sum())
        text = (
            f"{left:,} of {self.count:,} weights left out: under {self.threshold:g}, or under "
            f"{SMALL_OF_ROW:.0%} of their row's largest"
        )
        if self.by_own_scale.any():
            text += (
                f"\n* no weight of the row reaches {self.threshold:g}: the {SMALL_OF_ROW:.0%} alone"
            )
        return text


def weights_of(
    model: SearchModel,
    threshold: float = THRESHOLD,
    means: Mapping[AttentionResiduals, Tensor] | None = None,
) -> list[SideWeights]:
    """The depth weights of a model's sides; for a grown model those of bottom and top.

    means: of attention residuals, from `deepfast.measure.depth_attention.mean_attention`. Sides
        that it lacks are left out.
    """
    found = []
    parts = {"": model}
    if hasattr(model, "bottom"):
        parts = {"bottom ": model.bottom, "top ": model}
    for part, side in product(parts, ("encoder", "decoder")):
        connection = getattr(getattr(parts[part], side, None), "connection", None)
        dlcl, residuals = (getattr(connection, name, None) for name in ("dlcl", "residuals"))
        if residuals is not None and means and residuals in means:
            note = "mean attention" + (" of sublayers" if residuals.reads > 1 else "")
            found.append(SideWeights(part + side, means[residuals], note, threshold))
        if dlcl is None:
            continue
        with torch.no_grad():
            weight = dlcl.effective_weight().float().cpu()
        note = ""
        if weight.dim() == 3:
            groups = f" in {dlcl.groups} groups" if dlcl.kind == "group" else ""
            note = f"mean over {dlcl.dim} channels{groups}"
            weight = weight.mean(2)
        found.append(SideWeights(part + side, weight, note, threshold))
    return found


def draw(sides: list[SideWeights], choices: list[SideChoices], path: Path) -> None:
    """Writes a picture as SVG or PNG, by the file's ending: W of each side and, below, what latent
    depth chooses. At least one of the two lists is not empty."""
    heights = ([WIDTH * 0.92] if sides else []) + [side.height for side in choices]
    widths = ([WIDTH * len(sides)] if sides else []) + [side.width for side in choices]
    with picture(path, max(widths), sum(heights)) as figure:
        figure.get_layout_engine().set(h_pad=0.08)
        if sides and choices:
            above, below = figure.subfigures(2, 1, height_ratios=(heights[0], sum(heights[1:])))
        else:
            above = below = figure
        if sides:
            _draw_weights(above, sides)
        if choices:
            draw_choices(below, choices)


def draw_source(sides: list[SideWeights], source: int, path: Path) -> None:
    """Writes a picture of one source's weight in the input of every layer that may read it, as in
    Figure 5c of Wang et al. 2019: a panel for each side."""
    with picture(path, WIDTH * len(sides), HEIGHT) as figure:
        panels = figure.subplots(1, len(sides), squeeze=False, sharey=True)[0]
        for axes, side in zip(panels, sides, strict=True):
            weights = side.matrix[source:, source].tolist()
            axes.bar(
                range(source + 1, source + 1 + len(weights)), weights, color=COLORS["deepfast"]
            )
            axes.axhline(0, color=GREY, linewidth=0.8)
            set_title(axes, side.title)
            axes.set_xlabel(f"input of layer ({len(side.matrix)}: the output)")
        panels[0].set_ylabel(f"weight of y{source}")


def source_rows(side: SideWeights, source: int) -> Iterator[tuple[str, str]]:
    """For each layer that may read the source: its name, and the source's weight."""
    for row in range(source, len(side.matrix)):
        feeds = "output" if row == len(side.matrix) - 1 else str(row + 1)
        yield feeds, f"{side.matrix[row, source]:.3f}"


def _draw_weights(figure, sides: list[SideWeights]) -> None:
    """Fills a figure, or a part of one, with a panel for each side."""
    shown = torch.cat([side.matrix[~side.hidden].abs() for side in sides])
    # One scale for all panels. The weight of a row with a single source says little.
    limit = shown.quantile(0.97).item() or 1.0
    panels = figure.subplots(1, len(sides), squeeze=False)[0]
    for axes, side in zip(panels, sides, strict=True):
        mesh = heat_map(axes, side.matrix.numpy(), hidden=side.hidden.numpy(), limit=limit)
        some = f"{(~side.hidden).sum():,} of {side.count:,} weights"
        set_title(axes, f"{side.title}: {some}")
    figure.colorbar(mesh, ax=list(panels), shrink=0.7, pad=0.02, extend="both")
    threshold = sides[0].threshold
    if threshold > 0:
        grey = f"grey: under {threshold:g}, or under {SMALL_OF_ROW:.0%} of the row's largest"
        if any(side.by_own_scale.any() for side in sides):
            grey += f"\nin rows without a weight of {threshold:g} the {SMALL_OF_ROW:.0%} alone"
        figure.supxlabel(grey, fontsize=8.5, color=GREY)


def rows_of(side: SideWeights) -> Iterator[tuple[str, str, str, str]]:
    """For each row: what it feeds, its strongest sources, how many are shown, the sum of all."""
    last = len(side.matrix) - 1
    for row, (weights, hidden) in enumerate(zip(side.matrix, side.hidden, strict=True)):
        order = weights.abs().argsort(descending=True, stable=True).tolist()
        kept = [k for k in order if not hidden[k]]
        named = [f"{k}: {weights[k]:.2f}" for k in kept[:STRONGEST]]
        feeds = "output" if row == last else str(row + 1)
        if side.by_own_scale[row]:
            feeds = f"* {feeds}"
        yield feeds, "  ".join(named), f"{len(kept)} of {row + 1}", f"{weights.sum():.2f}"


def show(sides: list[SideWeights], source: int | None = None) -> None:
    """Prints a table for each side to the terminal; with ``source`` the weights of that one."""
    require("rich", "the table of weights")
    from rich.table import Column

    from deepfast.measure.console import Console, show_table

    console = Console()
    for side in sides:
        if source is not None:
            title = f"Weight of y{source} in the {side.title}"
            show_table(console, ["input of", "weight"], source_rows(side, source), title)
            continue
        strongest = Column("strongest sources (0: the embedding)", no_wrap=True)
        columns: list[Column | str] = ["input of", strongest, "shown", "sum"]
        show_table(console, columns, rows_of(side), f"Depth weights of the {side.title}")
        console.print(f"{side.caption}\n", highlight=False)
