"""A picture of how a fusion weighs the layers: a panel for each hop, layers by words."""

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from deepfast.measure.pictures import heat, picture

INCHES_PER_WORD, INCHES_PER_LAYER = 0.42, 0.24
NOT_OF_LETTERS = ("Last Resort", "STIXSize", "STIXNonUnicode", "cm")
"""Fonts of matplotlib that show boxes or wrong characters."""


def draw(
    weights: Tensor, words: Sequence[str], path: Path, *, title: str, across: str = "words"
) -> str:
    """Writes the picture as SVG or PNG, by the file's ending.

    Args:
        weights: (words, hops, L + 1); each row of layers adds up to 1; layer 0 is the embedding.
        words: the labels of the columns.
        path: ends in .svg or .png.
        title: above the picture.
        across: the label of the horizontal axis.

    Returns:
        The characters of the words that no font of this machine has. An SVG keeps them, because
        another machine may have the fonts. A PNG shows the code of each, such as U+4E2D.
    """
    fonts, missing = fonts_for("".join(words))
    if path.suffix == ".png":
        words = [coded(word, missing) for word in words]
    count, hops, layers = weights.shape
    width = max(3.0, 1.4 + INCHES_PER_WORD * count)
    height = 1.3 + hops * (0.45 + INCHES_PER_LAYER * layers)
    with warnings.catch_warnings(), picture(path, width, height, font_family=fonts) as figure:
        # The caller gets these characters, so the warning is not needed.
        warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from")
        panels = figure.subplots(hops, 1, sharex=True, squeeze=False)[:, 0]
        for hop, axes in enumerate(panels):
            values = weights[:, hop].T.cpu().numpy()
            mesh = heat(axes, values, cmap="Greens", vmin=0, vmax=1)
            # The embedding is below.
            axes.invert_yaxis()
            axes.set_yticks([k + 0.5 for k in range(layers)], range(layers))
            if hops > 1:
                axes.set_title(f"hop {hop + 1}", fontsize=9)
        # A word may contain dollar signs.
        panels[-1].set_xticks(
            [at + 0.5 for at in range(count)], words, rotation=60, ha="right",
            rotation_mode="anchor", parse_math=False,
        )  # fmt: skip
        panels[-1].set_xlabel(across)
        figure.supylabel("layer (0: the embedding)", fontsize=9.5)
        figure.colorbar(mesh, ax=list(panels), label="weight", shrink=0.7)
        figure.suptitle(title, fontsize=10)
    return missing


def fonts_for(text: str) -> tuple[list[str], str]:
    """Font families, in the order in which a character is looked up, that together cover as many
    characters of the text as possible; and the characters that no font of this machine has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    families = ["sans-serif"]
    missing = {c for c in text if not c.isspace()} - _characters(
        findfont(FontProperties(family=families))
    )
    if not missing:
        return families, ""
    others = {
        entry.name: entry.fname
        for entry in fontManager.ttflist
        if (entry.style, entry.weight) == ("normal", 400)
        and not entry.name.startswith(NOT_OF_LETTERS)
    }
    while missing:
        best = max(sorted(others), key=lambda name: len(missing & _characters(others[name])))
        found = missing & _characters(others[best])
        if not found:
            break
        families.append(best)
        missing -= found
    return families, "".join(sorted(missing))


@cache
def _characters(font: str) -> frozenset[str]:
    """The characters for which a font's file has a glyph."""
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(font).get_charmap()))


def coded(word: str, missing: str) -> str:
    """The word with missing characters replaced by their codes."""
    return "".join(f"U+{ord(c):04X}" if c in missing else c for c in word)
