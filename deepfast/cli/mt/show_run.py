"""Shows how a training run went, from the lines of metrics in its folder.

Prints the norm of the gradient of each layer, before clipping, at the first, the middle and the
last line. With --output it draws NLL, accuracy and these norms over the steps. A run in two stages
(depth growing) has a folder for each."""

import argparse
from pathlib import Path

from deepfast.cli.outputs import check_picture

EXAMPLE = "deepfast mt show-run runs/phrases-dlcl30 --output run.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the output of deepfast mt train")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a picture, .svg or .png")


def run(args: argparse.Namespace) -> int:
    from deepfast.measure.run_picture import check_rows, draw, side_norms, table
    from deepfast.mt.training.report import read_metrics

    check_picture("--output", args.output)
    rows = read_metrics(args.folder)
    if not any(row["event"] == "train" for row in rows):
        raise ValueError(f"{args.folder}: expected a run with steps, got none yet")
    check_rows(rows)
    for side in side_norms(rows):
        print(*table(side), "", sep="\n")
    if args.output is not None:
        draw(rows, args.output)
        print(f"drawn: {args.output}")
    return 0
