"""Shows the depth weights W that a model has learned: which layers each layer reads, and how much.

Prints a table and, with --output, draws a picture in the manner of Figure 5 of Wang et al. 2019. W
is shown as it is applied, masked and softmaxed where the model does so; of several weights for a
pair of layers the mean over channels. Weights under 0.1, or under 5% of their row's largest, are
left out."""

import argparse
from pathlib import Path

EXAMPLE = "deepfast show-weights runs/phrases-dlcl30/average.pt --output weights.svg"

PICTURES = (".svg", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast train, or by deepfast convert")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a picture, .svg or .png")


def run(args: argparse.Namespace) -> int:
    from deepfast.models.checkpoint import load_model
    from deepfast.profiling import weight_picture

    if args.output is not None and args.output.suffix not in PICTURES:
        raise ValueError(f"--output: expected a file ending in .svg or .png, got {args.output}")
    model, _ = load_model(args.checkpoint)
    try:
        sides = weight_picture.weights_of(model)
    except ValueError as error:
        raise ValueError(f"{args.checkpoint}: {error}") from error
    weight_picture.show(sides)
    if args.output is not None:
        weight_picture.draw(sides, args.output)
        print(f"drawn: {args.output}")
    return 0
