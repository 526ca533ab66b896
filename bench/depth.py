"""CPU time of one thread and peak memory of a step over depth: `python -m bench.depth`.

Forward and backward of a pre-norm encoder, 1,024 tokens, D=256, fp32, without dropout. DLCL and
full attention residuals, with two reads a layer, are computed by deepfast and by one fused pass for
each row, DLCL also by a stack and a sum and, up to 24 layers, by a loop for each row under
`torch.compile`, which takes a minute to compile. The forms take turns; other work on the machine
disturbs CPU time less than time. The numbers go to bench/results/results.csv, and pictures for
light and dark pages beside it. It takes 5 to 10 minutes; ``--draw`` only draws.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from bench.claims import peak_bytes, step
from bench.record import FILE, processor, read, record
from deepfast.clock import on_cpu
from deepfast.measure.clock import interleave, ratio
from deepfast.measure.encoders import RESIDUAL
from deepfast.measure.forms import AttentionForm, CompiledLoop, FusedPerLayer, StackAndSum
from deepfast.measure.pictures import BLUE, COLORS, Look, over_depth, picture
from deepfast.ops import attention_residual

DEPTHS, SENTENCES = (6, 12, 24, 48), 32
GREEN, RED, GREY = COLORS["deepfast"], COLORS["stack and sum"], COLORS[RESIDUAL]
PER_ROW = partial(AttentionForm, lambda values, norm, query: attention_residual(query, values))
FORMS = {
    "residual": ("plain residual", "residual", None),
    "dlcl": ("deepfast: DLCL", "dlcl", None),
    "attnres": ("deepfast: attn. residuals", "attnres", None),
    "dlcl_per_row": ("per row: DLCL", "dlcl", FusedPerLayer),
    "attnres_per_row": ("per row: attn. residuals", "attnres", PER_ROW),
    "dlcl_stack": ("stack and sum: DLCL", "dlcl", StackAndSum),
    "dlcl_compiled": ("compiled loop: DLCL", "dlcl", CompiledLoop),
}
"""Key -> name, connection of the encoder, and what computes it in place of deepfast."""
MOST_COMPILED = 24
"""Layers: compiling a loop for each row takes time that grows with the square of the depth."""
PANELS = {
    "ratio": ("", "CPU time of a step over that of the plain residual"),
    "gib": ("_gib", "Peak memory of a step, GiB"),
}
"""Name of the picture -> what its keys end with, and its title."""
DARK = {
    "text_color": "#c9d1d9", "axes_edgecolor": "#8b949e", "axes_labelcolor": "#c9d1d9",
    "xtick_color": "#c9d1d9", "ytick_color": "#c9d1d9", "grid_color": "#30363d",
}  # fmt: skip
LIGHTER = {GREEN: "#3fc49a", RED: "#f0873f", GREY: "#a9b1ba", BLUE: "#58b0f0"}
"""The colours on a dark page."""


def measure(rounds: int) -> None:
    """Records every form at every depth."""
    torch.set_num_threads(1)
    command, clock = "python -m bench.depth", partial(on_cpu, now=time.process_time)
    for depth in DEPTHS:
        runs = {
            key: step(depth, connection, form, sentences=SENTENCES, dropout=0.0)
            for key, (_, connection, form) in FORMS.items()
            if form is not CompiledLoop or depth <= MOST_COMPILED
        }
        # What counts memory stands in the way of a compiled function, which is compiled here.
        peaks = {
            key: runs[key]() if FORMS[key][2] is CompiledLoop else peak_bytes(runs[key])
            for key in runs
        }
        rows = interleave(runs, repeats=rounds, warmup=0, clock=clock)
        for key in runs:
            name = FORMS[key][0]
            what = f"step, forward and backward: {name}, L={depth}, T=1024, D=256, fp32"
            over = ratio(rows[key], rows["residual"])
            record(f"depth_{key}_{depth}", over, "x", f"CPU time over residual: {what}", command)
            if peaks[key] is not None:
                peak = peaks[key] / 2**30
                record(f"depth_{key}_{depth}_gib", peak, "GiB", f"peak memory: {what}", command)


def draw(folder: Path) -> None:
    """The numbers of this processor: one picture of the time, one of the memory."""
    results, here = read(), processor()
    for panel, (end, title) in PANELS.items():
        found = {
            name: [
                (d, results[f"depth_{key}_{d}{end}", here].value)
                for d in DEPTHS
                if (f"depth_{key}_{d}{end}", here) in results
            ]
            for key, (name, *_) in FORMS.items()
        }
        colors_of = dict(zip(found, (GREY, GREEN, BLUE, GREEN, BLUE, RED, RED), strict=True))
        curves = {name: points for name, points in found.items() if points}
        for suffix, style in (("", {}), ("_dark", DARK)):
            colors = {name: colors_of[name] for name in curves}
            if style:
                colors = {name: LIGHTER[color] for name, color in colors.items()}
            strong = [name for name in curves if name.startswith("deepfast")]
            dashed = [name for name in curves if name.startswith(("per row", "compiled"))]
            with picture(folder / f"depth_{panel}{suffix}.svg", ground="none", **style) as figure:
                axes = figure.add_subplot()
                axes.set_title(title)
                over_depth(axes, curves, Look(colors, strong, dashed))


def draw_schedule(path: Path, rows: int = 16, block: int = 4) -> None:
    """Which states each row of a stack reads: a box for each read, over the rows that share it."""
    from matplotlib.patches import Rectangle

    with picture(path) as figure:
        axes = figure.add_subplot()
        for row in range(rows):
            begin = row - row % block
            near = [(k, row, 1, COLORS["loop of adds"]) for k in range(begin, row + 1)]
            far = [(k, begin, block, BLUE) for k in range(begin) if row == begin]
            for k, top, height, color in near + far:
                box = Rectangle((k + 0.1, top + 0.1), 0.8, height - 0.2, color=color, linewidth=0)
                axes.add_patch(box)
        axes.set(xlim=(0, rows), ylim=(rows, 0), aspect="equal")
        axes.grid(False)
        axes.set_xlabel("state: 0 is the embedding, k the output of layer k")
        axes.set_ylabel("row: the input of layer")
        axes.set_xticks([k + 0.5 for k in range(0, rows, block)], range(0, rows, block))
        axes.set_yticks([k + 0.5 for k in range(0, rows, block)], range(1, rows + 1, block))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args(argv)
    if not args.draw:
        measure(args.rounds)
    draw(FILE.parent)
    draw_schedule(FILE.parent / "schedule.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
