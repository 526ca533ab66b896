"""Decoding arguments and the run of a search, for `translate` and `score`."""

import argparse
import contextlib
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from deepfast import checks
from deepfast.cli.outputs import device_of
from deepfast.mt.search import (
    DecodingOptions,
    Translation,
    Translator,
    load_translator,
    translate_nbest,
)
from deepfast.mt.search.options import ALPHA, GAMMA, LENGTH_FORMS

OPTIONS = [field.name for field in fields(DecodingOptions)]
REPEATED = [*OPTIONS, "language", "device", "precision", "threads"]
"""Arguments of a search, which the command that `score --tune` prints repeats."""


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a search. One that is not given is None or False."""
    default = DecodingOptions()
    group = parser.add_argument_group(
        "decoding", "beam and length penalty are by default those of the checkpoint's recipe"
    )
    add = group.add_argument
    add("--beam", type=int, help="hypotheses kept per sentence; 1 is greedy search")
    text = "alpha of the score, at least 0; higher: longer translations"
    add("--length-penalty", type=float, help=text)
    text = "the score of n tokens with eos is log P / ((5 + n) / 6)^alpha (gnmt) or log P / n^alpha"
    add("--length-form", choices=LENGTH_FORMS, help=f"{text} (power, as in fairseq)")
    text = f"most source tokens of a batch; default: {default.max_tokens}"
    add("--max-tokens", type=int, help=text)
    text = "most tokens of a translation; default: 2 * source tokens + 10"
    add("--max-length", type=int, help=text)
    add("--language", help="put the tag of this language in front of every line")
    add("--no-unknown", action="store_true", help="never generate unk")
    text = "replace each unk by the source word with the most attention"
    add("--replace-unknown", action="store_true", help=text)
    text = "translate unknown words by a file that deepfast mt posunk has written"
    add("--dictionary", metavar="FILE", help=text)
    add("--device", help="cpu or cuda; default: cuda where there is a GPU")
    add("--precision", choices=("float32", "bfloat16"), help="default: float32")
    add("--threads", type=int, help="CPU threads; default: torch's")
    add = parser.add_argument_group(
        "deep-shallow decoding, for a model that has grown; score --tune finds alpha and gamma"
    ).add_argument
    text = "translate with the model and with its bottom alone, and rank all translations"
    add("--deep-shallow", action="store_true", help=text)
    text = f"weight of the network that found a translation, 0 to 1; default: {ALPHA}"
    add("--alpha", type=float, help=text)
    text = f"power of the length that divides the score; default: {GAMMA}"
    add("--gamma", type=float, help=text)


def to_translate(checkpoints: object, *words: str) -> str:
    """The line that says how to use a checkpoint, or a list of them."""
    listed = checkpoints if isinstance(checkpoints, list) else [checkpoints]
    # Argparse would read -x/best.pt as an option.
    paths = [f"./{path}" if str(path).startswith("-") else str(path) for path in listed]
    return f"to translate: deepfast mt translate {shlex.join([*paths, *words])} < FILE"


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those arguments of a search that were given."""
    values = {name: getattr(args, name, None) for name in names}
    # Not by equality: 0 is a value.
    return {k: v for k, v in values.items() if v is not None and v is not False}


def words(values: dict[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    found = []
    for name, value in values.items():
        found.append(f"--{name.replace('_', '-')}")
        found += [] if value is True else [f"{value}"]
    return found


def say(args: argparse.Namespace, text: object) -> None:
    """Writes a line to stderr."""
    print(f"deepfast {args.command}: {text}", file=sys.stderr)


def translator_of(args: argparse.Namespace) -> tuple[Translator, DecodingOptions]:
    """The checkpoints of the arguments, on their device, and how to decode; sets the CPU threads.

    Says on stderr how the text is decoded.
    """
    if args.threads is not None:
        checks.whole("decoding", most=checks.MOST_THREADS, threads=args.threads)
        torch.set_num_threads(args.threads)
    translator = load_translator(args.checkpoint, device_of(args.device))
    options = replace(translator.decoding, **given(args, OPTIONS))
    say(args, f"decoding: {options}")
    return translator, options


@contextlib.contextmanager
def warnings_said(args: argparse.Namespace) -> Iterator[None]:
    """Writes the warnings of a block to stderr, each as a line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        say(args, warning.message)


@contextlib.contextmanager
def searching(args: argparse.Namespace, translator: Translator) -> Iterator[None]:
    """The precision of the arguments; warnings go to stderr."""
    device = next(translator.model.parameters()).device.type
    narrow = args.precision == "bfloat16"
    with warnings_said(args), torch.autocast(device, torch.bfloat16, enabled=narrow):
        yield


def translate(
    args: argparse.Namespace,
    translator: Translator,
    lines: Sequence[str],
    options: DecodingOptions,
) -> list[list[Translation]]:
    """The translations of every line; the speed goes to stderr."""
    lines = translator.prepare(lines, args.language)
    started = time.perf_counter()
    with searching(args, translator):
        found = translate_nbest(translator.model, translator.vocabulary, lines, options)
    seconds = max(time.perf_counter() - started, 1e-9)
    tokens = sum(len(best[0].tokens) + 1 for best in found if best[0].tokens)
    say(
        args,
        f"{len(lines)} lines in {seconds:.1f} s, {len(lines) / seconds:.1f} lines/s, "
        f"{tokens / seconds:.1f} target tokens/s",
    )
    return found
