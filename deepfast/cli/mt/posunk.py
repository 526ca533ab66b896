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
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from deepfast.cli.outputs import check_other

EXAMPLE = "deepfast mt posunk train.en train.fr dev.en dev.fr --words 80000 --output marked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="SOURCE TARGET", help="texts, plain or gzip; pairs of files")
    add("--words", type=int, required=True, help="how many target words the model is to know")
    add("--output", type=Path, required=True, help="a folder; made if needed")


def run(args: argparse.Namespace) -> int:
    from deepfast import checks
    from deepfast.files import make_folder
    from deepfast.mt.data.align import Aligner
    from deepfast.mt.data.posunk import annotated, write_translations
    from deepfast.mt.data.text import write_lines

    checks.whole("posunk", words=args.words)
    sources, targets = args.files[::2], args.files[1::2]
    names = [Path(target).name for target in targets]
    if len(sources) != len(targets) or len({*names, "dictionary"}) <= len(names):
        raise ValueError(
            "expected pairs of SOURCE and TARGET whose targets have different names, got "
            + " ".join(args.files)
        )
    for name in ("dictionary", *names):
        check_other(args.output / name, args.files)
    files = [*zip(sources, targets, strict=True)]
    for pair in files[1:]:
        # A mistake in the last text must not show after hours of the first.
        for _ in _pairs(*pair):
            pass
    if not any(source and target for source, target in _pairs(*files[0])):
        raise ValueError(
            f"expected a line with words on both sides in {sources[0]} and {targets[0]}, got none"
        )
    make_folder(args.output)
    aligner = Aligner(_pairs(*files[0]), say=lambda line: print(line, file=sys.stderr, flush=True))
    known = aligner.most_frequent(args.words)
    found: dict[str, Counter[str]] = defaultdict(Counter)

    def marked(pair: tuple[str, str], totals: list[int]) -> Iterator[str]:
        """The lines of a target with marks; adds its words and the unknown ones to totals."""
        text, again = _pairs(*pair), _pairs(*pair)
        for (source, target), links in zip(text, aligner.links(again), strict=True):
            if pair is files[0]:
                for i, j in links:
                    found[source[i]][target[j]] += 1
            totals[0] += len(target)
            totals[1] += sum(word not in known for word in target)
            yield " ".join(annotated(target, links, known))

    for name, pair in zip(names, files, strict=True):
        totals = [0, 0]
        write_lines(args.output / name, marked(pair, totals))
        print(f"{args.output / name}: {totals[0]:,} words, {totals[1]:,} unknown")
    write_translations(args.output / "dictionary", found)
    print(args.output / "dictionary")
    return 0


def _pairs(source: str, target: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words of both sides of every line. A text must not hold marks: they would be taken for
    words, and become translations in the dictionary."""
    from deepfast.mt.data.posunk import MARK
    from deepfast.mt.data.text import aligned

    for number, *lines in aligned(source, target):
        left, right = (line.split() for line in lines)
        for path, words in ((source, left), (target, right)):
            if marks := [word for word in words if word.startswith("<") and MARK.fullmatch(word)]:
                raise ValueError(f"{path}:{number}: expected a text without marks, got {marks[0]}")
        yield left, right
