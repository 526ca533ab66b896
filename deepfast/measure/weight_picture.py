"""What a model has learned of its depth, as a picture and as tables: the depth weights W of DLCL or
the mean weights of attention residuals, and the choice of layers of latent depth.

W is that of Wang et al. 2019, Figure 5. Weights under 10% of the largest of their row are left out.

Latent depth (Li et al., Deep Transformers with Latent Depth, 2020) has a probability
``sigma(logit)`` of each layer for each language. Evaluation keeps a layer whose probability is at
least a threshold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from deepfast.measure.pictures import INK, WIDTH, heat, picture, weight_map
from deepfast.mt.models.interface import SearchModel
from deepfast.nn import DLCL, AttentionResiduals

SMALL_OF_ROW = 0.1
STRONGEST = 4
"""How many sources of a row a table has: as many as fit a terminal of 80 columns."""


@dataclass(frozen=True)
class SideWeights:
    """The applied W of the encoder or the decoder, or the mean weights of attention residuals."""

    name: str
    """The side, and what was averaged."""
    matrix: Tensor
    """(L+1, L+1): masked to the pattern and softmaxed if the DLCL does so; with several weights per
    pair of layers, their mean over channels."""

    @property
    def hidden(self) -> Tensor:
        """(L+1, L+1) bool: the weight is small, or the row cannot read the source."""
        size = self.matrix.abs()
        small = size < SMALL_OF_ROW * size.amax(1, keepdim=True)
        return small | torch.ones_like(small).triu(1)

    @property
    def caption(self) -> str:
        """How many weights are shown."""
        size = len(self.matrix)
        return f"{int((~self.hidden).sum()):,} of {size * (size + 1) // 2:,} weights"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """For each row: what it feeds, its strongest sources, how many are shown, the sum of
        all."""
        for row, (weights, hidden) in enumerate(zip(self.matrix, self.hidden, strict=True), 1):
            order = weights.abs().argsort(descending=True, stable=True).tolist()
            kept = [k for k in order if not hidden[k]]
            named = "  ".join(f"{k}: {weights[k]:.2f}" for k in kept[:STRONGEST])
            feeds = "output" if row == len(self.matrix) else str(row)
            yield feeds, named, f"{len(kept)} of {row}", f"{weights.sum():.2f}"


def weights_of(
    model: SearchModel, means: Mapping[AttentionResiduals, Tensor] | None = None
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
        depth, note = getattr(connection, "depth", None), ""
        if isinstance(depth, AttentionResiduals) and means and depth in means:
            weight = means[depth]
            note = ", mean attention" + (" of sublayers" if depth.reads > 1 else "")
        elif isinstance(depth, DLCL):
            weight = depth.effective_weight().detach().float().cpu()
            if weight.dim() == 3:
                groups = f" in {depth.groups} groups" if depth.weight_type == "group" else ""
                note = f", mean over {depth.dim} channels{groups}"
                weight = weight.mean(2)
        else:
            continue
        found.append(SideWeights(f"{part}{side}{note}", weight))
    return found


@dataclass(frozen=True)
class SideChoices:
    """The choice of layers of the encoder or the decoder."""

    name: str
    languages: list[str]
    probability: Tensor
    """(N, L) for N languages and L layers."""
    kept: Tensor
    """(N, L) bool: the layers that evaluation uses."""
    threshold: float

    @property
    def counts(self) -> list[str]:
        """How many layers each language keeps."""
        return [f"{count} of {self.kept.shape[1]}" for count in self.kept.sum(1).tolist()]


def choices_of(model: SearchModel) -> list[SideChoices]:
    """The choices of the sides of a model with latent depth; an empty list for other models.

    Raises:
        ValueError: if a logit is not a number.
    """
    found = []
    for side in ("encoder", "decoder"):
        latent = getattr(getattr(model, side, None), "latent", None)
        if latent is not None:
            languages = list(model.config.languages) or ["all"]
            kept = torch.tensor([latent.keeps(index) for index in range(len(languages))])
            probability = latent.logits.detach().float().sigmoid().cpu()
            found.append(SideChoices(side, languages, probability, kept, latent.threshold))
    return found


def draw(sides: list[SideWeights], choices: list[SideChoices], path: Path) -> None:
    """Writes a picture as SVG or PNG, by the file's ending: a panel with W of each side and, below,
    what latent depth chooses. At least one of the two lists is not empty."""
    heights = [WIDTH * 0.92] * len(sides) + [1.15 + 0.26 * len(c.languages) for c in choices]
    with picture(path, WIDTH, sum(heights)) as figure:
        panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
        for axes, weights in zip(panels, sides, strict=False):
            weight_map(axes, weights.matrix.numpy(), weights.hidden.numpy())
            axes.set_title(f"{weights.name}: {weights.caption}")
        if sides:
            grey = f"grey: under {SMALL_OF_ROW:.0%} of the row's largest"
            figure.supxlabel(grey, fontsize=8.5, color=INK)
        for axes, choice in zip(panels[len(sides) :], choices, strict=True):
            _draw_choices(axes, choice)


def _draw_choices(axes, side: SideChoices) -> None:
    """The probabilities of a side: languages by layers."""
    languages, layers = side.kept.shape
    mesh = heat(axes, side.probability.numpy(), cmap="Greens", vmin=0, vmax=1)
    rows, columns = side.kept.nonzero(as_tuple=True)
    colors = ["white" if p > 0.6 else "black" for p in side.probability[side.kept]]
    axes.scatter(columns + 0.5, rows + 0.5, s=9 if layers <= 40 else 3, c=colors)
    step = 1 if layers <= 24 else 5 if layers <= 60 else 10
    ticks = range(step - 1, layers, step)
    axes.set_xticks([t + 0.5 for t in ticks], [str(t + 1) for t in ticks])
    names = [f"{n}: {count}" for n, count in zip(side.languages, side.counts, strict=True)]
    axes.set_yticks([i + 0.5 for i in range(languages)], names, parse_math=False)
    axes.set_title(f"{side.name}: choice of layers")
    axes.set_xlabel(f"layer (dot: kept, probability of at least {side.threshold:g})")
    axes.figure.colorbar(mesh, ax=axes, pad=0.02, ticks=[0, 0.5, 1], label="probability")


def show(sides: list[SideWeights], choices: list[SideChoices]) -> None:
    """Prints a table for each side to the terminal; of choices a line for each language."""
    from rich.table import Column

    from deepfast.measure.console import show_table

    strongest = Column("strongest sources (0: the embedding)", no_wrap=True)
    for weights in sides:
        columns: list[Column | str] = ["input of", strongest, "shown", "sum"]
        show_table(columns, weights.rows(), title=f"Depth weights of the {weights.name}")
        print(f"{weights.caption}; left out: under {SMALL_OF_ROW:.0%} of their row's largest\n")
    for side in choices:
        # rich would wrap a title of the table to the width of the table.
        print(f"Layers of the {side.name} with a probability of at least {side.threshold:g}")
        rows = [
            (name, count, " ".join(str(layer + 1) for layer in kept.nonzero()[:, 0].tolist()))
            for name, count, kept in zip(side.languages, side.counts, side.kept, strict=True)
        ]
        show_table(["language", "kept", Column("layers")], rows)
