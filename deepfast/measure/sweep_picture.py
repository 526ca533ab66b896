"""The picture of a sweep: BLEU and dev NLL, a line for each point and a mark for each seed."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepfast.files import write_atomically
from deepfast.measure.pictures import GREY, WIDTH, dots, picture
from deepfast.mt.sweep.runs import Result
from deepfast.mt.sweep.stages import Results
from deepfast.mt.sweep.table import known, page

PANELS = {"test_bleu": "BLEU", "nll": "dev NLL, nats"}
"""What a run's result has -> the title of its panel."""
LABEL = 22
"""Letters of a line beside the axis."""


def write_page(folder: Path, results: Results, pilots: Results, command: str) -> None:
    """Writes the page of a sweep and its picture into its folder, see `page`."""
    write_atomically(folder / "sweep.md", page(results, pilots, command).encode())
    draw(results, folder / "sweep.svg")


def panels(results: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, list[float]]]:
    """Title of a panel -> name of a point -> the values of its runs."""
    return {
        title: {name: known(runs, field) for name, runs in results.items()}
        for field, title in PANELS.items()
    }


def draw(results: Results, path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending. The first point is the baseline."""
    wrapped = {"\n".join(textwrap.wrap(p.name, LABEL)): runs for p, runs in results.items()}
    found = panels(wrapped)
    measured = {title: lines for title, lines in found.items() if any(lines.values())}
    with picture(path, WIDTH, 1.1 + 0.3 * len(results)) as figure:
        text = "each seed a circle, the mean a bar"
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=GREY)
        dots(figure, measured or found)
