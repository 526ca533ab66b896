"""Scores translations against references: cased and lower-cased BLEU, and chrF, each with
sacrebleu's signature.

Give two files, or --checkpoint with --source and --reference to translate first. Files are UTF-8,
detokenised, one sentence a line, plain or gzip; for tokenised text give --tokenize none. Where the
checkpoint's recipe has data.lowercase, the references are lower-cased first, as in training.

--tune finds the decoding with the best BLEU on a dev text: alpha (0 to 1) and gamma (0 to 2) of
deep-shallow decoding for a model that has grown, beam and length penalty for any other. The last
line of the output is the command to translate with."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

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
from deepfast.mt.data.text import aligned, read_lines
from deepfast.mt.search import Translator, bleu, tune
from deepfast.mt.search.options import DecodingOptions
from deepfast.mt.search.score import TOKENIZERS, require_tokenizer

EXAMPLE = """deepfast mt score translations.de test.de
  deepfast mt score --checkpoint model.pt --source test.en --reference test.de
  deepfast mt score --checkpoint model.pt --source dev.en --reference dev.de --tune"""

TUNED = ("deep_shallow", "alpha", "gamma")
"""Arguments that --tune does not read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("hypotheses", nargs="?", metavar="HYPOTHESES", help="translations")
    add("references", nargs="?", metavar="REFERENCES", help="their references, line by line")
    add("--json", action="store_true", help="print JSON instead of text")
    text = "sacrebleu's tokenizer; default: by the checkpoint's data.target_language, else 13a"
    add("--tokenize", choices=TOKENIZERS, help=text)
    group = parser.add_argument_group("translate first")
    group.add_argument("--checkpoint", nargs="+", help="written by deepfast mt train")
    group.add_argument("--source", help="the text to translate")
    group.add_argument("--reference", help="its reference translation")
    group.add_argument("--tune", action="store_true", help="find the best decoding of this text")
    add_decoding_arguments(parser)


def run(args: argparse.Namespace) -> int:
    files = [args.hypotheses, args.references]
    model = [args.checkpoint, args.source, args.reference]
    lowercase, tokenize = False, args.tokenize or "13a"
    if all(files) and not any(model) and not args.tune:
        hypotheses, references = map(read_lines, files)
    elif all(model) and not any(files):
        pairs = [pair for _, *pair in aligned(args.source, args.reference)]
        sources, references = ([pair[side] for pair in pairs] for side in (0, 1))
        translator, options = translator_of(args)
        lowercase, tokenize = translator.lowercase, args.tokenize or translator.tokenizer
        require_tokenizer(tokenize)
        references = translator.prepare_references(references)
        if args.tune:
            return _tune(args, translator, sources, references, options, tokenize)
        found = translate(args, translator, sources, options)
        hypotheses = [best[0].text for best in found]
    else:
        raise ValueError(
            "expected HYPOTHESES and REFERENCES, or --checkpoint with --source and --reference"
        )
    with warnings_said(args):
        scores = bleu(hypotheses, references, tokenize=tokenize)
    if args.json:
        print(json.dumps(asdict(scores) | {"lowercase": lowercase}, indent=2))
    else:
        print(scores, *["references lower-cased, as in training"] * lowercase, sep="\n")
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
    # Of equals the first, which is the given one.
    best, score = max(tried, key=lambda pair: pair[1])
    old_values, values = asdict(before), asdict(best)
    changed = {name: value for name, value in values.items() if value != old_values[name]}
    if args.json:
        print(json.dumps({"bleu": score, "before": old, "tokenize": tokenize} | changed, indent=2))
        return 0
    print(f"BLEU {score:.2f} with {best}, tokenizer {tokenize}")
    print(f"a gain of {score - old:.2f} over {before}")
    kept = given(args, [name for name in REPEATED if name not in TUNED])
    print(to_translate(args.checkpoint, *words(kept | changed)))
    return 0
