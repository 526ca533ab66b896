"""Which layers latent depth has learned to use, as a picture and as a table.

Li et al., Deep Transformers with Latent Depth, 2020: the probability ``sigma(logit)`` of each layer
for each language. Evaluation keeps a layer whose probability is at least a threshold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast.files import require
from deepfast.measure.pictures import WIDTH, set_title
from deepfast.mt.models.interface import SearchModel

COLUMNS = 5
"""Languages of one table: as many as fit a terminal of 80 columns."""
MARGIN, INCHES_PER_LAYER, INCHES_PER_LANGUAGE = 1.9, 0.22, 0.26


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
    def rule(self) -> str:
        """The condition under which a layer is kept."""
        return f"kept: probability of at least {self.threshold:g}"

    @property
    def width(self) -> float:
        """The width of its panel in inches; many layers are drawn narrower."""
        return min(max(WIDTH, MARGIN + INCHES_PER_LAYER * self.kept.shape[1]), 2 * WIDTH)

    @property
    def height(self) -> float:
        """The height of its panel in inches."""
        return 1.15 + INCHES_PER_LANGUAGE * len(self.languages)


def choices_of(model: SearchModel) -> list[SideChoices]:
    """The choices of the sides of a model with latent depth; an empty list for other models.

    Raises:
        ValueError: if a logit is not a number.
    """
    found = []
    for side in ("encoder", "decoder"):
        latent = getattr(getattr(model, side, None), "latent", None)
        if latent is None:
            continue
        languages = list(model.config.languages) or ["all"]
        kept = torch.tensor([latent.keeps(index) for index in range(len(languages))])
        probability = latent.logits.detach().float().sigmoid().cpu()
        found.append(SideChoices(side, languages, probability, kept, latent.threshold))
    return found


def draw_choices(figure, choices: list[SideChoices]) -> None:
    """Fills a figure, or a part of one, with a panel for each side: languages by layers."""
    panels = figure.subplots(
        len(choices), 1, squeeze=False, height_ratios=[side.height for side in choices]
    )[:, 0]
    for axes, side in zip(panels, choices, strict=True):
        languages, layers = side.kept.shape
        mesh = axes.pcolormesh(
            side.probability.numpy(), cmap="Greens", vmin=0, vmax=1, edgecolors="white",
            linewidth=0.5 if layers <= 60 else 0.0,
        )  # fmt: skip
        places = side.kept.nonzero()
        colors = ["white" if p > 0.6 else "black" for p in side.probability[side.kept]]
        axes.scatter(places[:, 1] + 0.5, places[:, 0] + 0.5, s=9 if layers <= 40 else 3, c=colors)
        axes.invert_yaxis()
        axes.grid(False)
        step = 1 if layers <= 24 else 5 if layers <= 60 else 10
        ticks = range(0 if step == 1 else step - 1, layers, step)
        axes.set_xticks([t + 0.5 for t in ticks], [str(t + 1) for t in ticks])
        counts = side.kept.sum(1).tolist()
        names = [f"{n}: {c} of {layers}" for n, c in zip(side.languages, counts, strict=True)]
        axes.set_yticks([i + 0.5 for i in range(languages)], names, parse_math=False)
        set_title(axes, f"{side.name}: choice of layers")
        axes.set_xlabel(f"layer (dot: kept, probability of at least {side.threshold:g})")
    figure.colorbar(mesh, ax=list(panels), pad=0.02, ticks=[0, 0.5, 1], label="probability")


def show_choices(choices: list[SideChoices]) -> None:
    """Prints a table for each side to the terminal, layers by languages."""
    require("rich", "the table of layers")
    from rich.table import Column
    from rich.text import Text

    from deepfast.measure.console import Console, show_table

    console = Console()
    for side in choices:
        layers = side.kept.shape[1]
        # rich would wrap a title of the table to the width of the table.
        console.print(f"Choice of layers of the {side.name}; {side.rule}", highlight=False)
        for start in range(0, len(side.languages), COLUMNS):
            some = slice(start, start + COLUMNS)
            counts = side.kept[some].sum(1).tolist()
            columns = [Column("layer", "kept", justify="right", no_wrap=True)]
            columns += [
                Column(Text(name), f"{count} of {layers}", no_wrap=True)
                for name, count in zip(side.languages[some], counts, strict=True)
            ]
            rows = enumerate(rows_of(side, some), 1)
            show_table(console, columns, ([str(layer), *cells] for layer, cells in rows))


def rows_of(side: SideChoices, some: slice) -> list[list[str]]:
    """For each layer and the given languages: the probability, and whether the layer is kept."""
    pairs = zip(side.probability[some].T.tolist(), side.kept[some].T.tolist(), strict=True)
    return [
        [f"{p:.2f}{' kept' if kept else ''}" for p, kept in zip(*row, strict=True)]
        for row in pairs
    ]  # fmt: skip
