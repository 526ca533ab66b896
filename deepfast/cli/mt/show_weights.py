"""Shows what a model has learned of its depth: the weights W of DLCL, the weights of attention
residuals, or the choice of layers of latent depth.

Prints tables and, with --output, draws a picture.

W says which layers each layer reads, and how much, as in Figure 5 of Wang et al. 2019. It is shown
as it is applied: masked and softmaxed if the model does so, and with several weights for a pair of
layers their mean over channels. Weights under the threshold, or under 5% of their row's largest,
are left out. In a row without any weight that reaches the threshold, only the 5% counts.

With --source K only one column of W is shown: the weight of y_K in the input of every layer above
it, as in Figure 5c. K = 0 is the embedding.

Attention residuals give each token its own weights. The output is their mean over the tokens of
--sample; in a decoder, over the model's own translations. Where each sublayer reads, rows count
sublayers.

For latent depth: the probability of each layer for each language, and whether it is kept."""

import argparse
import math
from pathlib import Path

from deepfast.cli.outputs import check_picture

EXAMPLE = "deepfast mt show-weights runs/phrases-dlcl30/average.pt --output weights.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast mt train or convert")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a picture, .svg or .png")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="smallest weight of W to show, at least 0; default 0.1; 0 shows all",
    )
    parser.add_argument(
        "--source", type=int, metavar="K", help="show the weights of this layer's output alone"
    )
    parser.add_argument(
        "--sample", type=Path, metavar="FILE", help="source sentences, for attention residuals"
    )


def run(args: argparse.Namespace) -> int:
    from deepfast.measure import weight_picture
    from deepfast.mt.models.checkpoint import load_model
    from deepfast.mt.models.interface import SearchModel

    check_picture("--output", args.output)
    threshold = weight_picture.THRESHOLD if args.threshold is None else args.threshold
    if not 0 <= threshold < math.inf:
        raise ValueError(f"--threshold: expected a number of at least 0, got {threshold:g}")
    model: SearchModel = load_model(args.checkpoint)[0]
    model, means = _means(args, model)
    sides = weight_picture.weights_of(model, threshold, means)
    try:
        choices = weight_picture.choices_of(model)
    except ValueError as error:
        raise ValueError(f"{args.checkpoint}: {error}") from error
    if not sides and not choices:
        raise ValueError(
            f"{args.checkpoint}: expected a model with DLCL, attention residuals or latent depth "
            "in the encoder or the decoder, got none of them"
        )
    if args.threshold is not None and not sides:
        raise ValueError(
            f"--threshold: expected a model with DLCL or attention residuals, got {args.checkpoint}"
        )
    if args.source is not None:
        sides = _with_source(args, sides)
        weight_picture.show_source(sides, args.source)
    else:
        weight_picture.show(sides, choices)
    if args.output is not None:
        if args.source is not None:
            weight_picture.draw_source(sides, args.source, args.output)
        else:
            weight_picture.draw(sides, choices, args.output)
        print(f"drawn: {args.output}")
    return 0


def _means(args: argparse.Namespace, model):
    """The model, and the mean weights of its attention residuals over --sample; None without."""
    from deepfast.measure.depth_attention import attention_residuals, mean_attention
    from deepfast.mt.data.text import read_lines
    from deepfast.mt.search import load_translator

    attends = bool(attention_residuals(model))
    if attends and args.sample is None:
        raise ValueError("--sample: expected source sentences for attention residuals, got none")
    if args.sample is None:
        return model, None
    if not attends:
        raise ValueError(
            f"--sample: expected a model with attention residuals, got {args.checkpoint}"
        )
    translator = load_translator([args.checkpoint], "cpu")
    lines = translator.prepare(read_lines(args.sample))
    return translator.model, mean_attention(translator.model, translator.vocabulary, lines)


def _with_source(args: argparse.Namespace, sides: list) -> list:
    """Those `weight_picture.SideWeights` that have the layer of --source."""
    deepest = max((len(side.matrix) - 1 for side in sides), default=-1)
    if not 0 <= args.source <= deepest:
        expected = f"a layer from 0 to {deepest}" if sides else "a model with weights of layers"
        raise ValueError(f"--source: expected {expected}, got {args.source}")
    if args.threshold is not None:
        raise ValueError("--threshold: cannot go with --source, which shows all weights")
    return [side for side in sides if args.source < len(side.matrix)]
