"""Translates lines of text with one checkpoint, or with several whose probabilities are averaged.

Files are UTF-8, one sentence a line, plain or gzip. The output keeps the order of the lines, and
an empty line stays empty. With --nbest above 1 the output has one line for each translation: the
number of the input line (from 1), the score and the text, separated by tabs."""

import argparse
import sys
from pathlib import Path

from deepfast.cli.mt.decoding import add_decoding_arguments, translate, translator_of
from deepfast.cli.outputs import check_other
from deepfast.files import check_writable
from deepfast.mt.data import read_lines
from deepfast.mt.data.text import read_standard_input, write_lines

EXAMPLE = "deepfast mt translate model.pt --input test.en.gz --output test.de --beam 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "written by deepfast mt train; several must share one vocabulary"
    parser.add_argument("checkpoint", nargs="+", help=text)
    parser.add_argument("--input", default="-", help="a text file, plain or gzip; - is stdin")
    parser.add_argument("--output", default="-", help="a file, gzip if named .gz; - is stdout")
    parser.add_argument("--nbest", type=int, help="translations per line, at most beam; default: 1")
    add_decoding_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.output != "-":
        check_writable(args.output)
        read = [*args.checkpoint, args.input, *([args.dictionary] if args.dictionary else [])]
        check_other(Path(args.output), read)
    lines = read_standard_input() if args.input == "-" else read_lines(args.input)
    translator, options = translator_of(args)
    results = translate(args, translator, lines, options)
    if options.nbest == 1:
        rows = [best[0].text for best in results]
    else:
        rows = [
            f"{number}\t{found.score:.4f}\t{found.text}"
            for number, best in enumerate(results, 1)
            for found in best
        ]
    if args.output == "-":
        sys.stdout.buffer.write("".join(f"{row}\n" for row in rows).encode("utf-8"))
    else:
        write_lines(args.output, rows)
    return 0
