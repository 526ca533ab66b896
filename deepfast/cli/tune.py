"""Finds the weights of deep-shallow decoding: alpha and gamma with the best BLEU on a dev text.

The checkpoint is of a model that has grown (a recipe with a section grow). It and its bottom
alone translate the text once each; then every pair of alpha (0 to 1) and gamma (0 to 2) ranks all
translations. Where none is better than the model alone, that is what the last line says to use.
Files are UTF-8, detokenised, one sentence a line, plain or gzip."""

import argparse
import json
from dataclasses import asdict
from functools import partial

from deepfast.cli.translate import (
    add_decoding_arguments,
    decoding_options,
    lowercased,
    searched,
    to_translate,
)
from deepfast.mt.data import read_lines
from deepfast.mt.search import tune_deep_shallow

EXAMPLE = "deepfast tune model.pt --source dev.en --reference dev.de"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast train")
    parser.add_argument("--source", required=True, help="text to translate")
    parser.add_argument("--reference", required=True, help="its reference translation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_decoding_arguments(parser)


def run(args: argparse.Namespace) -> int:
    lines, references = read_lines(args.source), read_lines(args.reference)
    if lowercased(args.checkpoint):
        references = [line.lower() for line in references]
    tuned = searched(args, lines, partial(tune_deep_shallow, references=references))
    if args.json:
        print(json.dumps(asdict(tuned), indent=2))
        return 0
    print(
        f"BLEU {tuned.bleu:.2f} with alpha {tuned.alpha:g} and gamma {tuned.gamma:g}; "
        f"{tuned.deep:.2f} deep alone, {tuned.shallow:.2f} shallow alone"
    )
    options = []
    gained = round(tuned.bleu - tuned.deep, 2)
    if gained > 0:
        options = ["--deep-shallow", "--alpha", f"{tuned.alpha:g}", "--gamma", f"{tuned.gamma:g}"]
        print(f"deep-shallow decoding gains {gained:.2f} BLEU over deep alone")
    else:
        print("deep-shallow decoding gains nothing over deep alone")
    print(to_translate(args.checkpoint, *options, *decoding_options(args)))
    return 0
