"""A picture of how a fusion weighs the layers: a panel for each hop, layers by words."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from deepfast.measure.pictures import heat, picture

INCHES_PER_WORD, INCHES_PER_LAYER = 0.42, 0.24


def draw(
    weights: Tensor, words: Sequence[str], path: Path, *, title: str, across: str = "words"
) -> None:
    """Writes the picture as SVG or PNG, by the file's ending.

    Args:
        weights: (words, hops, L + 1); each row of layers adds up to 1; layer 0 is the embedding.
        words: the labels of the columns.
        path: ends in .svg or .png. An SVG leaves letters to the fonts of its viewer; in a PNG one
            that matplotlib's font lacks is a box, with a warning.
        title: above the picture.
        across: the label of the horizontal axis.
    """
    count, hops, layers = weights.shape
    width = max(3.0, 1.4 + INCHES_PER_WORD * count)
    height = 1.3 + hops * (0.45 + INCHES_PER_LAYER * layers)
    with warnings.catch_warnings(), picture(path, width, height) as figure:
        if path.suffix == ".svg":
            warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from")
        panels = figure.subplots(hops, 1, sharex=True, squeeze=False)[:, 0]
        for hop, axes in enumerate(panels):
            mesh = heat(axes, weights[:, hop].T.cpu().numpy(), cmap="Greens", vmin=0, vmax=1)
            # The embedding is below.
            axes.invert_yaxis()
            axes.set_yticks([k + 0.5 for k in range(layers)], range(layers))
            if hops > 1:
                axes.set_title(f"hop {hop + 1}", fontsize=9)
        # A word may contain dollar signs.
        axes.set_xticks(
            [at + 0.5 for at in range(count)], words, rotation=60, ha="right",
            rotation_mode="anchor", parse_math=False,
        )  # fmt: skip
        axes.set_xlabel(across)
        figure.supylabel("layer (0: the embedding)", fontsize=9.5)
        figure.colorbar(mesh, ax=list(panels), label="weight", shrink=0.7)
        figure.suptitle(title, fontsize=10)
