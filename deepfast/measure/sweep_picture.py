"""The picture of a sweep: BLEU and dev NLL, a line for each point and a mark for each seed."""

import statistics
import textwrap
from pathlib import Path

from deepfast.files import write_atomically
from deepfast.measure.pictures import GREEN, GREY, WIDTH, picture
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


def draw(results: Results, path: Path) -> None:
    """Writes the picture as SVG or PNG, by the file's ending. The first point is the baseline."""
    panels = [name for name in PANELS if any(known(runs, name) for runs in results.values())]
    panels = panels or list(PANELS)
    with picture(path, WIDTH, 1.1 + 0.3 * len(results)) as figure:
        text = "each seed a circle, the mean a bar"
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=GREY)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, name in zip(grid, panels, strict=True):
            axes.set_title(PANELS[name])
            for at, runs in enumerate(results.values()):
                values = known(runs, name)
                color = GREEN if at else GREY
                axes.plot(values, [at] * len(values), "o", color=color, markersize=4.5,
                          fillstyle="none")  # fmt: skip
                if values:
                    mean = statistics.mean(values)
                    axes.plot([mean], [at], "|", color=color, markersize=13, markeredgewidth=2)
                    if not at:
                        axes.axvline(mean, color=GREY, linestyle=":", linewidth=1)
            axes.margins(x=0.08)
        labels = ["\n".join(textwrap.wrap(point.name, LABEL)) for point in results]
        grid[0].set_yticks(range(len(results)), labels, parse_math=False)
        grid[0].set_ylim(len(results) - 0.4, -0.6)
