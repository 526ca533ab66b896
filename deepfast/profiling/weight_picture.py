"""The depth weights that a model has learned, as a picture and as a table.

As in Wang et al. 2019, Figure 5, a weight is left out where it is small: of magnitude under 0.1,
or under 5% of the largest in its row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from deepfast.data.errors import require
from deepfast.profiling.pictures import STYLE, WIDTH, heat_map

SMALL, SMALL_OF_ROW = 0.1, 0.05
STRONGEST = 5
"""Sources of a row that the table names."""


@dataclass(frozen=True)
class SideWeights:
    """W of the encoder or the decoder, as it is applied."""

    name: str
    matrix: Tensor
    """(L+1, L+1): masked to the pattern and softmaxed where the DLCL does so; of several weights
    per pair of layers the mean over channels."""
    note: str
    """What was averaged, or nothing."""

    @property
    def title(self) -> str:
        """Of picture and table."""
        return f"{self.name}{f', {self.note}' if self.note else ''}"

    @property
    def hidden(self) -> Tensor:
        """(L+1, L+1) bool: small, or a source that the row cannot read."""
        size = self.matrix.abs()
        small = (size < SMALL) | (size < SMALL_OF_ROW * size.amax(1, keepdim=True))
        return small | torch.ones_like(small).triu(1)


def weights_of(model: nn.Module) -> list[SideWeights]:
    """The depth weights of a model's sides; of one that has grown those of bottom and top.

    Raises:
        ValueError: a model without any.
    """
    found = []
    parts = {"": model}
    if hasattr(model, "bottom"):
        parts = {"bottom ": model.bottom, "top ": model}
    for part, side in product(parts, ("encoder", "decoder")):
        connection = getattr(getattr(parts[part], side, None), "connection", None)
        dlcl = getattr(connection, "dlcl", None)
        if dlcl is None:
            continue
        with torch.no_grad():
            weight = dlcl.effective_weight().float().cpu()
        note = ""
        if weight.dim() == 3:
            groups = f" in {dlcl.groups} groups" if dlcl.kind == "group" else ""
            note = f"mean over {dlcl.dim} channels{groups}"
            weight = weight.mean(2)
        found.append(SideWeights(part + side, weight, note))
    if not found:
        raise ValueError("expected a model with DLCL in the encoder or the decoder, got none")
    return found


def draw(sides: list[SideWeights], path: Path) -> None:
    """Writes a picture with one panel for each side, as SVG or PNG by the file's ending."""
    matplotlib = require("matplotlib", "drawing weights")
    from matplotlib.figure import Figure

    shown = torch.cat([side.matrix[~side.hidden].abs() for side in sides])
    # One scale for all panels. Of a row that reads one source alone the weight says little.
    limit = shown.quantile(0.97).item() if shown.numel() else 1.0
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * len(sides), WIDTH * 0.92), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08)
        panels = figure.subplots(1, len(sides), squeeze=False)[0]
        for axes, side in zip(panels, sides, strict=True):
            mesh = heat_map(axes, side.matrix.numpy(), hidden=side.hidden.numpy(), limit=limit)
            count = len(side.matrix)
            some = f"{(~side.hidden).sum():,} of {count * (count + 1) // 2:,} weights"
            axes.set_title(f"{side.title}: {some}", loc="left", fontsize=10)
        figure.colorbar(mesh, ax=panels, shrink=0.7, pad=0.02, extend="both")
        figure.supxlabel(
            f"grey: under {SMALL:g}, or under {SMALL_OF_ROW:.0%} of the row's largest",
            fontsize=8.5, color="#555555",
        )  # fmt: skip
        # Nothing of the day: the same command writes the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(
            path, dpi=200, bbox_inches="tight", facecolor="white", metadata=metadata
        )  # fmt: skip


def rows_of(side: SideWeights) -> Iterator[tuple[str, str, str, str]]:
    """Of each row: what it feeds, its strongest sources, how many are not small, their sum."""
    last = len(side.matrix) - 1
    for row, (weights, hidden) in enumerate(zip(side.matrix, side.hidden, strict=True)):
        order = weights.abs().argsort(descending=True, stable=True).tolist()
        kept = [k for k in order if not hidden[k]]
        named = [f"{k}: {weights[k]:.2f}" for k in kept[:STRONGEST]]
        feeds = "output" if row == last else str(row + 1)
        yield feeds, "  ".join(named), f"{len(kept)} of {row + 1}", f"{weights.sum():.2f}"


def show(sides: list[SideWeights]) -> None:
    """Prints a table for each side to the terminal."""
    require("rich", "the table of weights")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for side in sides:
        table = Table(title=f"Depth weights of the {side.title}", box=box.SIMPLE)
        table.add_column("input of", justify="right", no_wrap=True)
        table.add_column("strongest sources (0: the embedding)", no_wrap=True)
        table.add_column("not small", justify="right", no_wrap=True)
        table.add_column("sum", justify="right", no_wrap=True)
        for cells in rows_of(side):
            table.add_row(*cells)
        console.print(table)
