"""What `translate`, `score` and `tune` share: decoding arguments, and the run of a search."""

import argparse
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeVar

import torch

from deepfast import checks
from deepfast.mt.search import (
    DecodingOptions,
    Translations,
    Translator,
    load_translator,
    translate_all,
)
from deepfast.mt.search.deep_shallow import ALPHA, GAMMA
from deepfast.mt.search.options import LENGTH_FORMS
from deepfast.mt.search.translator import PRECISIONS

Results = TypeVar("Results")


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a search."""
    default = DecodingOptions()
    group = parser.add_argument_group("decoding")

    def add(name: str, text: str, **options) -> None:
        value = getattr(default, name.replace("-", "_"))
        text = f"{text}; default: %(default)s"
        group.add_argument(f"--{name}", default=value, help=text, **options)

    add("beam", "hypotheses kept per sentence; 1 is greedy search", type=int)
    add("length-penalty", "alpha of the score, at least 0; higher: longer translations", type=float)
    text = "the score of n tokens with eos is log P / ((5 + n) / 6)^alpha (gnmt) or log P / n^alpha"
    add("length-form", f"{text} (power, as in fairseq)", choices=LENGTH_FORMS)
    add("max-tokens", "most source tokens of a batch", type=int)
    text = "most tokens of a translation; default: 2 * source tokens + 10"
    group.add_argument("--max-length", type=int, help=text)
    group.add_argument("--language", help="put the tag of this language in front of every line")
    group.add_argument("--no-unknown", action="store_true", help="never generate unk")
    group.add_argument("--device", help="cpu or cuda; default: cuda where there is a GPU")
    group.add_argument("--precision", choices=PRECISIONS, default="float32")
    group.add_argument("--threads", type=int, help="CPU threads; default: torch's")


def add_translation_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `translate` and `score`: `add_decoding_arguments` and more."""
    add_decoding_arguments(parser)
    text = "replace each unk by the source word with the most attention"
    parser.add_argument("--replace-unknown", action="store_true", help=text)
    text = "translate unknown words by a file that deepfast mt posunk has written"
    parser.add_argument("--dictionary", metavar="FILE", help=text)
    group = parser.add_argument_group("deep-shallow decoding, for a model that has grown")
    text = "translate with the model and with its bottom alone, and rank all translations"
    group.add_argument("--deep-shallow", action="store_true", help=text)
    text = f"weight of the network that found a translation, 0 to 1; default: {ALPHA}"
    group.add_argument("--alpha", type=float, help=text)
    text = f"power of the length that divides the score; default: {GAMMA}"
    group.add_argument("--gamma", type=float, help=text)


def decoding_options(args: argparse.Namespace) -> DecodingOptions:
    """The options among a command's arguments, which have the fields' names."""
    names = [field.name for field in fields(DecodingOptions) if hasattr(args, field.name)]
    return DecodingOptions(**{name: getattr(args, name) for name in names})


def decoding_words(args: argparse.Namespace) -> list[str]:
    """The arguments of `add_decoding_arguments` that differ from their default, as shell words."""
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    words = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value != default:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def to_translate(checkpoint: object, *words: str) -> str:
    """The line that says how to use a checkpoint."""
    path = str(checkpoint)
    # Argparse would read -x/best.pt as an option.
    path = f"./{path}" if path.startswith("-") else path
    return f"to translate: deepfast mt translate {shlex.join([path, *words])} < FILE"


def translator_of(args: argparse.Namespace) -> Translator:
    """The checkpoints of the arguments, on their device; sets the CPU threads."""
    if args.threads is not None:
        checks.whole("decoding", most=checks.MOST_THREADS, threads=args.threads)
        torch.set_num_threads(args.threads)
    paths = [args.checkpoint] if isinstance(args.checkpoint, str) else args.checkpoint
    return load_translator(paths, args.device)


def translate(
    args: argparse.Namespace, translator: Translator, lines: Sequence[str]
) -> Translations:
    """The translations of every line; reports the run on stderr."""
    options = decoding_options(args)
    results = run_search(args, translator, lines, translate_all, options)
    if options.deep_shallow and options.alpha is None and options.gamma is None:
        print(
            f"deepfast {args.command}: alpha {ALPHA} and gamma {GAMMA} are defaults and can be "
            "worse than the model alone: deepfast mt tune finds good ones on a dev text",
            file=sys.stderr,
        )
    return results


def run_search(
    args: argparse.Namespace,
    translator: Translator,
    lines: Sequence[str],
    find: Callable[..., Results],
    options: DecodingOptions,
) -> Results:
    """``find(model, vocabulary, lines, options)`` of a translator.

    Warnings and the speed go to stderr.
    """
    lines = translator.prepare(lines, args.language)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, translator.precision(args.precision):
        warnings.simplefilter("always")
        results = find(translator.model, translator.vocabulary, lines, options)
    seconds = time.perf_counter() - started
    for warning in caught:
        print(f"deepfast {args.command}: {warning.message}", file=sys.stderr)
    said = f"{len(lines)} lines in {seconds:.1f} s, {len(lines) / max(seconds, 1e-9):.1f} lines/s"
    if isinstance(results, Translations):
        said += f", {results.target_tokens / max(seconds, 1e-9):.1f} target tokens/s"
    print(f"deepfast {args.command}: {said}", file=sys.stderr)
    return results
