"""Predicts the peak memory of a training step, and how deep, wide or long a model fits a budget.

Give three of --budget, --num-layers, --dim and --tokens, and the fourth is solved for. Give all
four to learn whether they fit. What each layer keeps for backward (its recompute policy) is chosen
so that the step fits with the least recomputation. Exit code 0: the step fits; 3: it does not, or
no size does, and a sentence says what would."""

import argparse
import json
import re
import sys
from pathlib import Path

from deepfast.cli.outputs import check_picture
from deepfast.memory.plan import DoesNotFitError, plan
from deepfast.memory.sizes import CHOICES
from deepfast.memory.table import lines
from deepfast.policies import POLICIES

EXAMPLE = "deepfast plan --budget 24GiB --dim 512 --tokens 8192"

DOES_NOT_FIT = 3

NUMBERS = {
    "num-layers": "layers of the encoder",
    "dim": "channels of a layer",
    "tokens": "tokens of a micro-batch, on the encoder's side",
    "num-heads": "attention heads; default: heads of 64 channels",
    "num-kv-heads": "heads of keys and values, a divisor of --num-heads; default: --num-heads",
    "ffn-dim": "channels of the feed-forward layers; default: 4 * dim",
    "vocab-size": "pieces; 0: a stack without embedding and loss; default: 32000",
    "decoder-layers": "layers of the decoder; 0: no decoder; default: 6",
    "target-tokens": "tokens on the decoder's side; default: --tokens",
    "accumulate": "micro-batches per step; default: 1",
    "length": "tokens per sentence; default: 128",
    "ranks": "processes that share the model; budget and tokens are of one of them; default: 1",
    "reads": "how often a layer reads attention residuals: 1, or 2: each sublayer; default: 2",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", help="bytes, such as 24GiB or 80GB")
    for name, text in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    for name, allowed in CHOICES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"one of {', '.join(allowed)}")
    names = ", ".join(POLICIES)
    parser.add_argument(
        "--recompute",
        help=f"of the encoder: one of {names}, or a list with commas; default: chosen",
    )
    parser.add_argument("--decoder-recompute", help="of the decoder, in the same form")
    parser.set_defaults(reshard=None, dropout=None)
    text = "with --parallel fsdp: keep gathered layers until backward"
    parser.add_argument("--no-reshard", dest="reshard", action="store_false", help=text)
    parser.add_argument("--no-dropout", dest="dropout", action="store_false")
    text = "sentences differ in length; tokens count the padding"
    parser.add_argument("--padding", action="store_true", default=None, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory over depth, .svg or .png, for every policy",
    )


def _options(args: argparse.Namespace) -> dict:
    """The arguments that were given, as keywords of `plan`."""
    names = ["budget", "recompute", "decoder_recompute", "dropout", "padding", "reshard", *CHOICES]
    names += [name.replace("-", "_") for name in NUMBERS]
    options = {name: getattr(args, name) for name in names}
    for name in ("recompute", "decoder_recompute"):
        if options[name] and "," in options[name]:
            options[name] = options[name].split(",")
    return {name: value for name, value in options.items() if value is not None}


def _as_options(error: ValueError, args: argparse.Namespace) -> str:
    """The error of `plan` with its arguments spelled as options. What is quoted stays."""
    names = "|".join(vars(args))
    pattern = rf"(?<!['\w-])({names})(?!['\w-])"
    return re.sub(pattern, lambda found: f"--{found[0].replace('_', '-')}", str(error))


def run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    try:
        result = plan(**_options(args))
    except DoesNotFitError as error:
        print(f"deepfast plan: {_as_options(error, args)}", file=sys.stderr)
        return DOES_NOT_FIT
    except ValueError as error:
        raise ValueError(_as_options(error, args)) from error
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print(*lines(result), sep="\n")
    if args.plot is not None:
        # matplotlib takes a second to import.
        from deepfast.measure.report_pictures import draw_plan

        draw_plan(result, args.plot)
    return 0 if result.fits else DOES_NOT_FIT
