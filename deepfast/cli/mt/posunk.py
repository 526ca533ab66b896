"""Prepares a parallel text for a model of whole words that translates unknown words by their place.

In every TARGET a word that is not among the --words most frequent ones of the first TARGET becomes
<unk:d>: the source word that it translates is d words earlier. To find this word, an alignment
is learned from the first pair of files (IBM model 1 in both directions). --output gets
a file of each TARGET's name, and dictionary, with the likeliest translation of every source word.

The text must be tokenised: words are what spaces separate. Train on the new targets with
data.whole_words=true and data.target_vocab_size = --words + 20, which counts the marks and the
special words. Then translate with --dictionary.

Luong et al., Addressing the Rare Word Problem in Neural Machine Translation, 2015."""

import argparse
from pathlib import Path

from deepfast.cli.outputs import replaces

EXAMPLE = "deepfast mt posunk train.en train.fr dev.en dev.fr --words 80000 --output marked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="SOURCE TARGET", help="texts, plain or gzip; pairs of files"
    )
    parser.add_argument(
        "--words", type=int, required=True, help="how many target words the model is to know"
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder; made if needed")


def run(args: argparse.Namespace) -> int:
    from deepfast import checks
    from deepfast.files import make_folder
    from deepfast.mt.data.align import Aligner
    from deepfast.mt.data.posunk import (
        annotated,
        most_frequent,
        word_translations,
        write_translations,
    )
    from deepfast.mt.data.text import write_lines

    checks.whole("posunk", words=args.words)
    sources, targets = args.files[::2], args.files[1::2]
    names = [Path(target).name for target in targets]
    if len(sources) != len(targets) or len({*names, "dictionary"}) <= len(names):
        raise ValueError(
            "expected pairs of SOURCE and TARGET whose targets have different names, got "
            + " ".join(args.files)
        )
    _check_output(args)
    texts = [_pairs(*files) for files in zip(sources, targets, strict=True)]
    if not any(source and target for source, target in texts[0]):
        raise ValueError(
            f"expected a line with words on both sides in {sources[0]} and {targets[0]}, got none"
        )
    make_folder(args.output)
    aligner = Aligner(texts[0])
    known = most_frequent([target for _, target in texts[0]], args.words)
    for name, pairs in zip(names, texts, strict=True):
        links = aligner.links(pairs)
        if pairs is texts[0]:
            write_translations(args.output / "dictionary", word_translations(pairs, links))
        lines = [
            annotated(target, own, known) for (_, target), own in zip(pairs, links, strict=True)
        ]
        write_lines(args.output / name, map(" ".join, lines))
        words = sum(len(target) for _, target in pairs)
        unknown = sum(word not in known for _, target in pairs for word in target)
        print(f"{args.output / name}: {words:,} words, {unknown:,} unknown")
    print(args.output / "dictionary")
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Refuses a folder in which a file to write is one of the files to read."""
    written = [args.output / "dictionary", *(args.output / Path(f).name for f in args.files[1::2])]
    for old in args.files:
        for new in written:
            if replaces(new, old):
                raise ValueError(
                    f"--output: expected a folder where {old} is not replaced, got {args.output}"
                )


def _pairs(source: str, target: str) -> list[tuple[list[str], list[str]]]:
    """The words of both sides of every line."""
    from deepfast.mt.data.text import read_aligned

    sides = zip((source, target), read_aligned(source, target), strict=True)
    return list(zip(*(_words(*side) for side in sides), strict=True))


def _words(path: str, text: list[str]) -> list[list[str]]:
    """The words of every line of a text, which must not hold marks: they would be taken for words,
    and become translations in the dictionary."""
    from deepfast.mt.data.posunk import MARK

    lines = [line.split() for line in text]
    for number, words in enumerate(lines, 1):
        for word in words:
            if word.startswith("<") and MARK.fullmatch(word):
                raise ValueError(f"{path}:{number}: expected a text without marks, got {word}")
    return lines
