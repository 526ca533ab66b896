"""Scores translations against references: cased and lower-cased BLEU, and chrF, each with
sacrebleu's signature.

Give two files, or --checkpoint with --source and --reference to translate first. Files are UTF-8,
detokenised, one sentence a line, plain or gzip.

--by-length 10,20 adds the cased BLEU of sentences whose source has up to 10, 11 to 20 and more
words; for two files it needs --source. With --checkpoint a line has the BLEU of the sentences
without unknown words: the target's vocabulary knows every piece of the reference, and no word of it
is a mark of deepfast mt posunk (Zhou et al., Deep Recurrent Models with Fast-Forward Connections
for Neural Machine Translation, 2016, section 4.5.2)."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepfast.cli.mt.decoding import add_translation_arguments, translate, translator_of
from deepfast.cli.outputs import check_picture
from deepfast.files import require
from deepfast.measure import pictures
from deepfast.mt.data.text import read_aligned, read_lines
from deepfast.mt.search import Part, bleu, bleu_by_length, bleu_of_part
from deepfast.mt.search.score import check_bounds

EXAMPLE = """deepfast mt score translations.de test.de
  deepfast mt score --checkpoint model.pt --source test.en --reference test.de"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hypotheses", nargs="?", metavar="HYPOTHESES", help="translations")
    parser.add_argument(
        "references", nargs="?", metavar="REFERENCES", help="their references, line by line"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--by-length", metavar="N,N", help="also BLEU by the words of a source, such as 10,20,30"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="--by-length as a picture, .svg or .png"
    )
    parser.add_argument("--source", help="text to translate; with two files, what was translated")
    group = parser.add_argument_group("translate first")
    group.add_argument("--checkpoint", nargs="+", help="written by deepfast mt train")
    group.add_argument("--reference", help="its reference translation")
    add_translation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    files = [args.hypotheses, args.references]
    model = [args.checkpoint, args.reference]
    bounds = None if args.by_length is None else _bounds(args.by_length)
    if args.picture and not bounds:
        raise ValueError("--picture: expected --by-length, whose scores it draws")
    check_picture("--picture", args.picture)
    if args.picture:
        require("matplotlib", "drawing BLEU by length")
    sources = known = None
    if all(files) and not any(model):
        if bounds and not args.source:
            raise ValueError("--by-length: expected --source, the text that was translated")
        hypotheses = read_lines(args.hypotheses)
        if args.source:
            sources, references = read_aligned(args.source, args.references)
        else:
            references = read_lines(args.references)
    elif all(model) and args.source and not any(files):
        sources, references = read_aligned(args.source, args.reference)
        translator = translator_of(args)
        hypotheses = [best[0][1] for best in translate(args, translator, sources).nbest]
        known = translator.knows(references)
    else:
        raise ValueError(
            "expected HYPOTHESES and REFERENCES, or --checkpoint with --source and --reference"
        )
    scores = bleu(hypotheses, references)
    parts: dict[str, list[Part]] = {}
    if bounds:
        parts["by_length"] = own = bleu_by_length(sources, hypotheses, references, bounds)
        if args.picture:
            pictures.parts(
                [p.name.removesuffix(" words") for p in own], [p.bleu for p in own], args.picture
            )
    if known is not None:
        name = "no unknown word in the reference"
        parts["known"] = [bleu_of_part(name, known, hypotheses, references)]
    if args.json:
        more = {key: [asdict(part) for part in own] for key, own in parts.items()}
        print(json.dumps(scores.as_dict() | more, indent=2))
    else:
        print(scores, *(part for own in parts.values() for part in own), sep="\n")
    return 0


def _bounds(text: str) -> Sequence[int]:
    try:
        return check_bounds([int(part) for part in text.split(",")])
    except ValueError as error:
        raise ValueError(
            f"--by-length: expected rising integers such as 10,20,30, got {text!r}"
        ) from error
