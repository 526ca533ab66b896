"""Scores translations against references: cased and lower-cased BLEU, and chrF, each with
sacrebleu's signature.

Give two files, or --checkpoint with --source and --reference to translate first. Files are UTF-8,
detokenised, one sentence a line, plain or gzip; for tokenised text give --tokenize none. Where the
checkpoint's recipe has data.lowercase, the references are lower-cased first, as in training.

--by-length 10,20 adds the cased BLEU of sentences whose source has up to 10, 11 to 20 and more
words; for two files it needs --source. With --checkpoint a line has the BLEU of the sentences
without unknown words: the target's vocabulary knows every piece of the reference, and no word of it
is a mark of deepfast mt posunk (Zhou et al., Deep Recurrent Models with Fast-Forward Connections
for Neural Machine Translation, 2016, section 4.5.2).

--tune finds the decoding with the best BLEU on a dev text: alpha (0 to 1) and gamma (0 to 2) of
deep-shallow decoding for a model that has grown, beam and length penalty for any other. The last
line of the output is the command to translate with."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepfast.cli.mt.decoding import (
    REPEATED,
    add_decoding_arguments,
    given,
    say,
    searching,
    to_translate,
    translate,
    translator_of,
    warnings_said,
    words,
)
from deepfast.cli.outputs import check_picture
from deepfast.files import require
from deepfast.measure import pictures
from deepfast.mt.data.text import aligned, read_lines
from deepfast.mt.search import Part, Translator, bleu, bleu_by_length, bleu_of_part, tune
from deepfast.mt.search.options import DecodingOptions
from deepfast.mt.search.score import TOKENIZERS, check_bounds, require_tokenizer

EXAMPLE = """deepfast mt score translations.de test.de
  deepfast mt score --checkpoint model.pt --source test.en --reference test.de
  deepfast mt score --checkpoint model.pt --source dev.en --reference dev.de --tune"""

DEEP_SHALLOW = ("deep_shallow", "alpha", "gamma")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("hypotheses", nargs="?", metavar="HYPOTHESES", help="translations")
    add("references", nargs="?", metavar="REFERENCES", help="their references, line by line")
    add("--json", action="store_true", help="print JSON instead of text")
    text = "sacrebleu's tokenizer; default: by the checkpoint's data.target_language, else 13a"
    add("--tokenize", choices=TOKENIZERS, help=text)
    text = "also BLEU by the words of a source, such as 10,20,30"
    add("--by-length", metavar="N,N", help=text)
    text = "--by-length as a picture, .svg or .png"
    add("--picture", type=Path, metavar="FILE", help=text)
    add("--source", help="text to translate; with two files, what was translated")
    group = parser.add_argument_group("translate first")
    group.add_argument("--checkpoint", nargs="+", help="written by deepfast mt train")
    group.add_argument("--reference", help="its reference translation")
    group.add_argument("--tune", action="store_true", help="find the best decoding of this text")
    add_decoding_arguments(parser)


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
    lowercase, tokenize = False, args.tokenize or "13a"
    if all(files) and not any(model) and not args.tune:
        if bounds and not args.source:
            raise ValueError("--by-length: expected --source, the text that was translated")
        hypotheses = read_lines(args.hypotheses)
        if args.source:
            sources, references = _both(args.source, args.references)
        else:
            references = read_lines(args.references)
    elif all(model) and args.source and not any(files):
        sources, references = _both(args.source, args.reference)
        translator, options = translator_of(args)
        lowercase, tokenize = translator.lowercase, args.tokenize or translator.tokenizer
        require_tokenizer(tokenize)
        references = translator.prepare_references(references)
        if args.tune:
            return _tune(args, translator, sources, references, options, tokenize)
        found = translate(args, translator, sources, options)
        hypotheses = [best[0].text for best in found]
        known = translator.knows(references)
    else:
        raise ValueError(
            "expected HYPOTHESES and REFERENCES, or --checkpoint with --source and --reference"
        )
    with warnings_said(args):
        scores = bleu(hypotheses, references, tokenize=tokenize)
    parts: dict[str, list[Part]] = {}
    if bounds:
        own = bleu_by_length(sources, hypotheses, references, bounds, tokenize)
        parts["by_length"] = own
        if args.picture:
            names = [part.name.removesuffix(" words") for part in own]
            pictures.parts(names, [part.bleu for part in own], args.picture)
    if known is not None:
        name = "no unknown word in the reference"
        parts["known"] = [bleu_of_part(name, known, hypotheses, references, tokenize)]
    if args.json:
        more = {key: [asdict(part) for part in own] for key, own in parts.items()}
        print(json.dumps(scores.as_dict() | {"lowercase": lowercase} | more, indent=2))
    else:
        print(scores, *["references lower-cased, as in training"] * lowercase, sep="\n")
        print(*(part for own in parts.values() for part in own), sep="\n", end="\n" * bool(parts))
    return 0


def _tune(
    args: argparse.Namespace,
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    options: DecodingOptions,
    tokenize: str,
) -> int:
    """Prints the best options, and the command to translate with them."""
    lines = translator.prepare(sources, args.language)
    tried = []
    with searching(args, translator):
        for choice, score in tune(
            translator.model, translator.vocabulary, lines, references, options, tokenize=tokenize
        ):
            tried.append((choice, score))
            if not choice.deep_shallow:
                say(args, f"BLEU {score:.2f} with {choice}")
    (before, old), *_ = tried
    # Of equals the first.
    best, score = max(tried, key=lambda pair: pair[1])
    gain = round(score - old, 2)
    names = DEEP_SHALLOW if best.deep_shallow else ("beam", "length_penalty")
    changed = {name: getattr(best, name) for name in names} if gain > 0 else {}
    if args.json:
        print(json.dumps({"bleu": score, "before": old, "tokenize": tokenize} | changed, indent=2))
        return 0
    print(f"BLEU {score:.2f} with {best}, tokenizer {tokenize}")
    print(f"a gain of {gain:.2f} over {before}")
    kept = {n: value for n, value in given(args, REPEATED).items() if n not in DEEP_SHALLOW}
    print(to_translate(args.checkpoint, *words(kept | changed)))
    return 0


def _bounds(text: str) -> Sequence[int]:
    try:
        return check_bounds([int(part) for part in text.split(",")])
    except ValueError as error:
        raise ValueError(
            f"--by-length: expected rising integers such as 10,20,30, got {text!r}"
        ) from error


def _both(source: str, references: str) -> list[list[str]]:
    """The lines of both files."""
    pairs = [pair for _, *pair in aligned(source, references)]
    return [[pair[side] for pair in pairs] for side in (0, 1)]
