"""How a fusion of layers weighs them: a panel for each hop, layers by words."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from deepfast.profiling.pictures import STYLE

INCHES_PER_WORD, INCHES_PER_LAYER = 0.42, 0.24


def draw(weights: Tensor, words: Sequence[str], path: Path, *, title: str) -> None:
    """Writes the picture as SVG or PNG, by the file's ending.

    Args:
        weights: (words, hops, L + 1), each row of layers adding up to 1; layer 0 is the embedding.
        words: what stands below the columns.
        path: ends in .svg or .png.
        title: above the picture.
    """
    import matplotlib
    from matplotlib.figure import Figure

    count, hops, layers = weights.shape
    width = max(3.0, 1.4 + INCHES_PER_WORD * count)
    height = 0.9 + hops * (0.35 + INCHES_PER_LAYER * layers)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(hops, 1, sharex=True, squeeze=False)[:, 0]
        for hop, axes in enumerate(panels):
            image = axes.imshow(
                weights[:, hop].T.tolist(), cmap="Greens", vmin=0, vmax=1, origin="lower",
                aspect="auto", interpolation="nearest",
            )  # fmt: skip
            axes.set_yticks(range(layers), ["emb", *map(str, range(1, layers))])
            axes.set_ylabel(f"hop {hop + 1}" if hops > 1 else "layer")
        panels[-1].set_xticks(range(count), words, rotation=60, ha="right", rotation_mode="anchor")
        figure.colorbar(image, ax=list(panels), label="weight", shrink=0.7)
        figure.suptitle(title, fontsize=10)
        # Nothing of the day: the same command writes the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150, facecolor="white")
