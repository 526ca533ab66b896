"""Scores translations against references: cased and lower-cased BLEU, and chrF, each with
sacrebleu's signature.

Give two files, or --checkpoint with --source and --reference to translate first. Files are UTF-8,
detokenised, one sentence a line, plain or gzip."""

import argparse
import json

from deepfast.cli.decoding import add_translation_arguments, translate
from deepfast.mt.data import read_lines
from deepfast.mt.search import bleu

EXAMPLE = """deepfast score translations.de test.de
  deepfast score --checkpoint model.pt --source test.en --reference test.de"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hypotheses", nargs="?", metavar="HYPOTHESES", help="translations")
    parser.add_argument(
        "references", nargs="?", metavar="REFERENCES", help="their references, line by line"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    group = parser.add_argument_group("translate first")
    group.add_argument("--checkpoint", nargs="+", help="written by deepfast train")
    group.add_argument("--source", help="text to translate")
    group.add_argument("--reference", help="its reference translation")
    add_translation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    files = [args.hypotheses, args.references]
    model = [args.checkpoint, args.source, args.reference]
    if all(files) and not any(model):
        scores = bleu(*map(read_lines, files))
    elif all(model) and not any(files):
        sources, references = read_lines(args.source), read_lines(args.reference)
        if len(sources) != len(references):
            # bleu would report this too, but only after the translation.
            raise ValueError(
                f"expected as many references as source lines, got {len(sources)} in "
                f"{args.source} and {len(references)} in {args.reference}"
            )
        scores = bleu([best[0][1] for best in translate(args, sources)], references)
    else:
        raise ValueError(
            "expected HYPOTHESES and REFERENCES, or --checkpoint with --source and --reference"
        )
    print(json.dumps(scores.as_dict(), indent=2) if args.json else scores)
    return 0
