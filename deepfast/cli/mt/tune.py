"""Finds the weights of deep-shallow decoding: alpha and gamma with the best BLEU on a dev text.

The checkpoint must be of a model that has grown (its recipe has a section grow). The model and its
bottom alone each translate the text once. Then every pair of alpha (0 to 1) and gamma (0 to 2)
ranks all translations. The last line of the output is the command to translate with: with the best
pair, or with the model alone if no pair is better. Files are UTF-8, detokenised, one sentence a
line, plain or gzip."""

import argparse
import json
from dataclasses import asdict

from deepfast.cli.mt.decoding import (
    add_decoding_arguments,
    decoding_options,
    decoding_words,
    run_search,
    to_translate,
    translator_of,
)
from deepfast.mt.data import read_lines
from deepfast.mt.search import DecodingOptions, tune_deep_shallow

EXAMPLE = "deepfast mt tune model.pt --source dev.en --reference dev.de"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast mt train")
    parser.add_argument("--source", required=True, help="text to translate")
    parser.add_argument("--reference", required=True, help="its reference translation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_decoding_arguments(parser)


def run(args: argparse.Namespace) -> int:
    lines, references = read_lines(args.source), read_lines(args.reference)
    translator = translator_of(args)
    if translator.lowercase:
        references = [line.lower() for line in references]

    def search(model, vocabulary, lines: list[str], options: DecodingOptions):
        return tune_deep_shallow(model, vocabulary, lines, references, options)

    tuned = run_search(args, translator, lines, search, decoding_options(args))
    if args.json:
        print(json.dumps(asdict(tuned), indent=2))
        return 0
    print(
        f"BLEU {tuned.bleu:.2f} with alpha {tuned.alpha:g} and gamma {tuned.gamma:g}; "
        f"{tuned.deep:.2f} deep alone, {tuned.shallow:.2f} shallow alone"
    )
    words = []
    gained = round(tuned.bleu - tuned.deep, 2)
    if gained > 0:
        words = ["--deep-shallow", "--alpha", f"{tuned.alpha:g}", "--gamma", f"{tuned.gamma:g}"]
        print(f"deep-shallow decoding gains {gained:.2f} BLEU over deep alone")
    else:
        print("deep-shallow decoding gains nothing over deep alone")
    print(to_translate(args.checkpoint, *words, *decoding_words(args)))
    return 0
