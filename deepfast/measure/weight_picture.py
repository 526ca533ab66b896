"""What a model has learned of its depth, as a picture and as tables: the depth weights W of DLCL or
the mean weights of attention residuals, and the choice of layers of latent depth.

As in Wang et al. 2019, Figure 5, small weights are left out: those under 0.1 in magnitude, or under
5% of the largest of their row. In a row without any weight of 0.1, such as an average over many
layers, only the 5% counts.

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

from deepfast.measure.pictures import COLORS, GREY, WIDTH, heat, picture, weight_map
from deepfast.mt.models.interface import SearchModel
from deepfast.nn import DLCL, AttentionResiduals

THRESHOLD, SMALL_OF_ROW = 0.1, 0.05
STRONGEST, COLUMNS = 4, 5
"""How many sources of a row, and how many languages, a table has: as many as fit a terminal of 80
columns."""


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
        return f"{self.name}, {self.note}" if self.note else self.name

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
    def shown(self) -> int:
        """How many of them are shown."""
        return int((~self.hidden).sum())

    @property
    def caption(self) -> str:
        """How many weights were left out, and why."""
        if self.threshold == 0:
            return f"all {self.count:,} weights are shown"
        rule = f"under {self.threshold:g}, or under {SMALL_OF_ROW:.0%} of their row's largest"
        text = f"{self.count - self.shown:,} of {self.count:,} weights left out: {rule}"
        if self.by_own_scale.any():
            text += (
                f"\n* no weight of the row reaches {self.threshold:g}: the {SMALL_OF_ROW:.0%} alone"
            )
        return text

    def feeds(self, row: int) -> str:
        """What a row of W is the input of."""
        return "output" if row == len(self.matrix) - 1 else str(row + 1)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """For each row: what it feeds, its strongest sources, how many are shown, the sum of
        all."""
        for row, (weights, hidden) in enumerate(zip(self.matrix, self.hidden, strict=True)):
            order = weights.abs().argsort(descending=True, stable=True).tolist()
            kept = [k for k in order if not hidden[k]]
            named = "  ".join(f"{k}: {weights[k]:.2f}" for k in kept[:STRONGEST])
            star = "* " if self.by_own_scale[row] else ""
            total = f"{weights.sum():.2f}"
            yield star + self.feeds(row), named, f"{len(kept)} of {row + 1}", total

    def source_rows(self, source: int) -> Iterator[tuple[str, str]]:
        """For each layer that may read the source: its name, and the source's weight."""
        for row in range(source, len(self.matrix)):
            yield self.feeds(row), f"{self.matrix[row, source]:.3f}"


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
        depth, note = getattr(connection, "depth", None), ""
        if isinstance(depth, AttentionResiduals) and means and depth in means:
            weight = means[depth]
            note = "mean attention" + (" of sublayers" if depth.reads > 1 else "")
        elif isinstance(depth, DLCL):
            weight = depth.effective_weight().detach().float().cpu()
            if weight.dim() == 3:
                groups = f" in {depth.groups} groups" if depth.weight_type == "group" else ""
                note = f"mean over {depth.dim} channels{groups}"
                weight = weight.mean(2)
        else:
            continue
        found.append(SideWeights(part + side, weight, note, threshold))
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
    def rule(self) -> str:
        """The condition under which a layer is kept."""
        return f"kept: probability of at least {self.threshold:g}"

    @property
    def counts(self) -> list[str]:
        """How many layers each language keeps."""
        return [f"{count} of {self.kept.shape[1]}" for count in self.kept.sum(1).tolist()]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of its panel in inches; many layers are drawn narrower."""
        languages, layers = self.kept.shape
        return min(max(WIDTH, 1.9 + 0.22 * layers), 2 * WIDTH), 1.15 + 0.26 * languages

    def rows(self, some: slice) -> list[list[str]]:
        """For each layer and the given languages: the probability, and whether it is kept."""
        return [
            [f"{p:.2f}{' kept' if kept else ''}" for p, kept in zip(*layer, strict=True)]
            for layer in zip(
                self.probability[some].T.tolist(), self.kept[some].T.tolist(), strict=True
            )
        ]


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


# ---- pictures ------------------------------------------------------------------------------------


def draw(sides: list[SideWeights], choices: list[SideChoices], path: Path) -> None:
    """Writes a picture as SVG or PNG, by the file's ending: W of each side and, below, what latent
    depth chooses. At least one of the two lists is not empty."""
    above = [(WIDTH * len(sides), WIDTH * 0.92)] if sides else []
    below = [side.size for side in choices]
    widths, heights = zip(*above, *below, strict=True)
    with picture(path, max(widths), sum(heights)) as figure:
        figure.get_layout_engine().set(h_pad=0.08)
        bands = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        if sides:
            _draw_weights(bands[0], sides)
        for band, side in zip(bands[len(above) :], choices, strict=True):
            _draw_choices(band, side)


def _draw_weights(figure, sides: list[SideWeights]) -> None:
    """Fills a part of a figure with a panel for each side."""
    shown = torch.cat([side.matrix[~side.hidden].abs() for side in sides])
    # One scale for all panels. The weight of a row with a single source says little.
    limit = shown.quantile(0.97).item() or 1.0
    panels = figure.subplots(1, len(sides), squeeze=False)[0]
    for axes, side in zip(panels, sides, strict=True):
        mesh = weight_map(axes, side.matrix.numpy(), hidden=side.hidden.numpy(), limit=limit)
        axes.set_title(f"{side.title}: {side.shown:,} of {side.count:,} weights")
    figure.colorbar(mesh, ax=list(panels), shrink=0.7, pad=0.02, extend="both")
    threshold = sides[0].threshold
    if threshold > 0:
        grey = f"grey: under {threshold:g}, or under {SMALL_OF_ROW:.0%} of the row's largest"
        if any(side.by_own_scale.any() for side in sides):
            grey += f"\nin rows without a weight of {threshold:g} the {SMALL_OF_ROW:.0%} alone"
        figure.supxlabel(grey, fontsize=8.5, color=GREY)


def _draw_choices(figure, side: SideChoices) -> None:
    """Fills a part of a figure with the probabilities of a side: languages by layers."""
    axes = figure.subplots()
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
    figure.colorbar(mesh, ax=axes, pad=0.02, ticks=[0, 0.5, 1], label="probability")


def draw_source(sides: list[SideWeights], source: int, path: Path) -> None:
    """Writes a picture of one source's weight in the input of every layer that may read it, as in
    Figure 5c of Wang et al. 2019: a panel for each side."""
    with picture(path, WIDTH * len(sides)) as figure:
        panels = figure.subplots(1, len(sides), squeeze=False, sharey=True)[0]
        for axes, side in zip(panels, sides, strict=True):
            weights = side.matrix[source:, source].tolist()
            layers = range(source + 1, source + 1 + len(weights))
            axes.bar(layers, weights, color=COLORS["deepfast"])
            axes.axhline(0, color=GREY, linewidth=0.8)
            axes.set_title(side.title)
            axes.set_xlabel(f"input of layer ({len(side.matrix)}: the output)")
        panels[0].set_ylabel(f"weight of y{source}")


# ---- tables --------------------------------------------------------------------------------------


def show(sides: list[SideWeights], choices: list[SideChoices]) -> None:
    """Prints a table for each side to the terminal; of choices layers by languages."""
    from rich.table import Column
    from rich.text import Text

    from deepfast.measure.console import show_table

    strongest = Column("strongest sources (0: the embedding)", no_wrap=True)
    for weights in sides:
        columns: list[Column | str] = ["input of", strongest, "shown", "sum"]
        show_table(columns, weights.rows(), title=f"Depth weights of the {weights.title}")
        print(f"{weights.caption}\n")
    for side in choices:
        # rich would wrap a title of the table to the width of the table.
        print(f"Choice of layers of the {side.name}; {side.rule}")
        for start in range(0, len(side.languages), COLUMNS):
            some = slice(start, start + COLUMNS)
            languages = [
                Column(Text(name), count, no_wrap=True)
                for name, count in zip(side.languages[some], side.counts[some], strict=True)
            ]
            layer = Column("layer", "kept", justify="right", no_wrap=True)
            rows = enumerate(side.rows(some), 1)
            show_table([layer, *languages], ([str(number), *cells] for number, cells in rows))


def show_source(sides: list[SideWeights], source: int) -> None:
    """Prints a table for each side with the weights of one source."""
    from deepfast.measure.console import show_table

    for side in sides:
        title = f"Weight of y{source} in the {side.title}"
        show_table(["input of", "weight"], side.source_rows(source), title=title)
