"""Translates lines of text with a checkpoint, or with the mean of the probabilities of several,
in the order of the lines.

The input is UTF-8, one sentence a line, plain or gzip. An empty line stays empty. With --nbest
above 1 the output has one line per hypothesis: the number of the input line (from 1), the score
and the text, separated by tabs."""

import argparse
import contextlib
import gzip
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepfast.mt.data import (
    DataError,
    TokenVocabulary,
    Vocabulary,
    lower,
    read_lines,
    read_vocabulary,
    split_tag,
    tag_of,
)
from deepfast.mt.data.text import GZIP_MAGIC, UTF8_MARK, write_atomically
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.search import Ensemble, deep_shallow_nbest, translate_nbest
from deepfast.mt.search.deep_shallow import ALPHA, GAMMA

EXAMPLE = "deepfast translate model.pt --input test.en.gz --output test.de --beam 4"

PRECISIONS = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", nargs="+",
        help="written by deepfast train or convert; several vote, over one vocabulary",
    )  # fmt: skip
    parser.add_argument("--input", default="-", help="text file, .gz too; - is standard input")
    parser.add_argument("--output", default="-", help="a file, .gz too; - is standard output")
    parser.add_argument("--nbest", type=int, default=1, help="translations per line, at most beam")
    add_decoding_arguments(parser)
    add_deep_shallow_arguments(parser)


def add_deep_shallow_arguments(parser: argparse.ArgumentParser) -> None:
    """How two networks translate, and what becomes of unknown words; shared with
    `deepfast score --checkpoint`."""
    parser.add_argument(
        "--replace-unknown", action="store_true",
        help="in place of unk, copy the source word that attention is on",
    )  # fmt: skip
    group = parser.add_argument_group("deep-shallow decoding, of a model that has grown")
    group.add_argument(
        "--deep-shallow", action="store_true", help="by the model and by its bottom alone, together"
    )
    group.add_argument(
        "--alpha", type=float,
        help=f"weight of the network that found a translation, 0 to 1; default {ALPHA}",
    )  # fmt: skip
    group.add_argument(
        "--gamma", type=float, help=f"power of the length that divides; default {GAMMA}"
    )


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """How to translate; shared with `deepfast score --checkpoint` and `deepfast tune`."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--beam", type=int, default=4, help="hypotheses kept; 1 is greedy")
    group.add_argument(
        "--length-penalty", type=float, default=0.6, help="alpha >= 0, higher is longer"
    )
    group.add_argument(
        "--max-length", type=int, help="most tokens a line; default 2 * source tokens + 10"
    )
    group.add_argument("--max-tokens", type=int, default=2000, help="source tokens of a batch")
    group.add_argument("--language", help="puts the tag of this language in front of every line")
    group.add_argument("--no-unknown", action="store_true", help="never generate unk")
    group.add_argument("--device", help="cpu or cuda; default: cuda where it is")
    group.add_argument("--precision", choices=PRECISIONS, default="float32")
    group.add_argument("--threads", type=int, help="CPU threads; default: torch's")


def decoding_options(args: argparse.Namespace) -> list[str]:
    """What `add_decoding_arguments` was given that is not the default, as words to give again."""
    parser = argparse.ArgumentParser()
    add_decoding_arguments(parser)
    words = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value != default:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def translate(
    args: argparse.Namespace, lines: list[str], nbest: int = 1
) -> list[list[tuple[float, str]]]:
    """Scores and texts of every line, as the arguments want it; tells of it on stderr."""
    given = {name: getattr(args, name) for name in ("alpha", "gamma")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not args.deep_shallow:
        raise ValueError(f"--{next(iter(given))}: expected --deep-shallow beside it, got none")
    for name in ("no_unknown", "deep_shallow"):
        if args.replace_unknown and getattr(args, name):
            raise ValueError(
                f"--replace-unknown: expected no --{name.replace('_', '-')} beside it, got both"
            )
    search = partial(translate_nbest, replace_unknown=args.replace_unknown)
    if args.deep_shallow:
        search = partial(deep_shallow_nbest, **given)
    results = searched(args, lines, partial(search, nbest=nbest))
    if args.deep_shallow and not given:
        print(
            f"deepfast {args.command}: alpha {ALPHA} and gamma {GAMMA} are defaults and can be "
            "worse than the model alone: deepfast tune finds those of a dev text",
            file=sys.stderr,
        )
    return results


def searched(args: argparse.Namespace, lines: list[str], search: Callable[..., Any]) -> Any:
    """What ``search(model, vocabulary, lines, **options)`` finds for the decoding arguments."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device that is here, got {device!r}: no GPU found")
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads: expected at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    paths = [args.checkpoint] if isinstance(args.checkpoint, str) else args.checkpoint
    model, vocabulary = _load(paths, device)
    if lowercased(paths[0]):
        lines = [lower(line, vocabulary.tags) for line in lines]
    if args.language is not None:
        lines = tagged(lines, args.language, model, vocabulary)
    started = time.perf_counter()
    with (
        torch.autocast(
            torch.device(device).type, torch.bfloat16, enabled=args.precision == "bfloat16"
        ),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        results = search(
            model,
            vocabulary,
            lines,
            beam=args.beam,
            length_penalty=args.length_penalty,
            max_length=args.max_length,
            max_tokens=args.max_tokens,
            suppress_unknown=args.no_unknown,
        )
    seconds = time.perf_counter() - started
    for warning in caught:
        print(f"deepfast {args.command}: {warning.message}", file=sys.stderr)
    print(
        f"deepfast {args.command}: {len(lines)} lines in {seconds:.1f} s, "
        f"{len(lines) / max(seconds, 1e-9):.1f} lines/s",
        file=sys.stderr,
    )
    return results


def _load(paths: list[str], device: str) -> tuple[torch.nn.Module, Vocabulary | TokenVocabulary]:
    """The model of one checkpoint, or of several as one, and their vocabulary."""
    loaded = [load_model(path, device) for path in paths]
    vocabulary, lowercase = loaded[0][1], lowercased(paths[0])
    for path, (_, other) in zip(paths, loaded, strict=True):
        if other != vocabulary:
            raise ValueError(
                f"{path}: expected the vocabulary of {paths[0]}, got another one: models that "
                "translate together share theirs"
            )
        if lowercased(path) != lowercase:
            raise ValueError(
                f"{path}: expected a model of {'lower-cased' if lowercase else 'cased'} text as "
                f"{paths[0]} is, got one of {'cased' if lowercase else 'lower-cased'} text"
            )
    models = [model for model, _ in loaded]
    return models[0] if len(models) == 1 else Ensemble(models), read_vocabulary(vocabulary)


def tagged(
    lines: list[str],
    language: str,
    model: torch.nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
) -> list[str]:
    """The lines with the tag of a language in front; shared with `deepfast show-attention`."""
    known = [tag.strip("<>") for tag in vocabulary.tags]
    for part in getattr(model, "models", (model,)):
        # A pruned model is for fewer than its vocabulary has tags of.
        own = getattr(part.config, "languages", None) or known
        known = [name for name in known if name in own]
    if language not in known:
        raise ValueError(
            f"--language: expected a language of the checkpoint ({', '.join(known) or 'none'}), "
            f"got {language!r}"
        )
    tag = tag_of(language)
    for number, line in enumerate(lines, 1):
        own, _ = split_tag(line)
        if own in vocabulary.tags:
            raise ValueError(
                f"--language: expected lines without a tag, got {own} in front of line {number}"
            )
    # An empty line stays empty.
    return [f"{tag} {line}" if line.strip() else line for line in lines]


def to_translate(checkpoint: object, *options: str) -> str:
    """The line that tells how to use a checkpoint; shared by all commands that write one."""
    return f"to translate: deepfast translate {shlex.join([str(checkpoint), *options])} < FILE"


def lowercased(checkpoint: str) -> bool:
    """Whether the model was trained on lower-cased text: capitals would all be unknown to it."""
    recipe = read_checkpoint(checkpoint).get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    return isinstance(data, dict) and bool(data.get("lowercase"))


def run(args: argparse.Namespace) -> int:
    # Before hours of translation, not after them.
    folder = os.path.dirname(args.output)
    if args.output != "-" and folder and not os.path.isdir(folder):
        raise ValueError(f"--output: expected a folder that exists, got {folder}")
    if args.output != "-" and os.path.isdir(args.output):
        raise ValueError(f"--output: expected a file, got the folder {args.output}")
    if args.output != "-" and not os.access(folder or ".", os.W_OK):
        raise ValueError(f"--output: expected a folder that can be written, got {folder or '.'}")
    lines = _standard_input() if args.input == "-" else read_lines(args.input)
    results = translate(args, lines, args.nbest)
    if args.nbest == 1:
        rows = (best[0][1] for best in results)
    else:
        rows = (
            f"{number}\t{score:.4f}\t{text}"
            for number, best in enumerate(results, 1)
            for score, text in best
        )
    content = "".join(f"{row}\n" for row in rows).encode("utf-8")
    if args.output == "-":
        _standard_output(content)
    else:
        # Without a time stamp the same text gives the same file.
        zipped = args.output.endswith(".gz")
        write_atomically(args.output, gzip.compress(content, mtime=0) if zipped else content)
    return 0


def _standard_input() -> list[str]:
    """The lines of standard input, ended as `read_lines` ends them."""
    content = sys.stdin.buffer.read()
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise DataError(f"standard input: damaged or cut short ({error})") from error
    lines = content.removeprefix(UTF8_MARK).split(b"\n")
    if not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            decoded.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"standard input:{number}: expected UTF-8, got byte "
                f"0x{error.object[error.start]:02x} at column {error.start + 1}"
            ) from error
    return decoded


def _standard_output(content: bytes) -> None:
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The reader has what it wanted. Python flushes once more at exit, which must not fail.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
