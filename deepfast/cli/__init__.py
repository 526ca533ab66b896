"""The `deepfast` command: one file per subcommand, and those of `deepfast mt` in a folder.

A subcommand's module has a docstring for its help, EXAMPLE (a command line),
`add_arguments(parser)` and `run(args) -> exit code`. Only the module of the command that is run is
imported.

Exit codes: 0 done; 1 refused with a sentence; 2 argparse does not understand the command line, or
the command has another name now; 3 nothing that `plan` was asked for fits; 130 interrupted.
"""

import argparse
import importlib
import os
import re
import sys
from functools import partial

from deepfast.cli.outputs import flush_output
from deepfast.version import __version__

COMMANDS = {
    "info": "versions, build, and which backend serves each op",
    "build": "compile the C++ ops for this machine",
    "selfcheck": "compare all kernels with float64 on this machine's GPU, and time them",
    "bench": "time ops against plain PyTorch on this machine",
    "report": "measure everything and write one HTML page",
    "plan": "how deep, wide and long a model fits a budget of memory",
    "mt": "train translation models, translate, score the translations",
    "mt train": "train a translation model from a recipe",
    "mt translate": "translate lines of text with a checkpoint",
    "mt score": "BLEU of translations against references, or the decoding with the best BLEU",
    "mt sweep": "compare systems, or the values of a key, over seeds: a plan and a page",
    "mt posunk": "mark unknown words of a training text by the source words that they translate",
    "mt prune": "write a model as a single file, without the layers that latent depth does not use",
    "mt show": "show the weights or the choice of layers that a model has learned",
}
"""By name; a group comes before its commands."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Argparse itself exits with 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="deepfast", description="Very deep Transformers with fused depth connections."
    )
    parser.set_defaults(run=partial(_list_commands, parser))
    parser.add_argument("--version", action="version", version=f"deepfast {__version__}")
    words = [word for word in argv if not word.startswith("-")]
    wanted = " ".join(words[: 2 if words[:1] == ["mt"] else 1])
    name = f"deepfast {wanted}".rstrip()
    closed = _replace_closed_streams(wanted)
    try:
        if any(word == "" or re.fullmatch("--[a-z-]+=", word) for word in argv):
            raise ValueError(f"expected text in every argument, got an empty one in {argv}")
        try:
            args = _parse(parser, wanted, argv)
        except SystemExit:
            # Argparse has printed a help text.
            sys.stdout.flush()
            raise
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe.
        if closed:
            print(f"{name}: standard output is closed", file=sys.stderr)
        return int(closed)
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        # The user gets one sentence; DEEPFAST_DEBUG=1 shows the traceback.
        if os.environ.get("DEEPFAST_DEBUG"):
            raise
        lost = flush_output()
        if isinstance(error, OSError) and error.filename is None and lost is not None:
            error.filename = "standard output"
        print(f"{name}: {_sentence(error).removeprefix(f'{wanted}: ')}", file=sys.stderr)
        return 1
    finally:
        flush_output()


def _sentence(error: Exception) -> str:
    """An error in words. That of torch's allocator on a CPU names a source file, and that of the
    operating system a number."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename
        return error.strerror if name is None else f"{name}: cannot be used ({error.strerror})"
    wanted = re.search(r"DefaultCPUAllocator: .* you tried to allocate (\d+ bytes)", str(error))
    if wanted is not None:
        return f"out of memory: tried to allocate {wanted[1]}"
    return str(error) or "out of memory"


def _list_commands(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Prints the commands where none is given."""
    parser.print_help(sys.stderr)
    return 2


def _parse(parser: argparse.ArgumentParser, wanted: str, argv: list[str]) -> argparse.Namespace:
    """The arguments of the wanted command, whose module is imported."""
    groups = {"": parser.add_subparsers(metavar="COMMAND")}
    for name, summary in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if name == "mt":
            command = groups[group].add_parser(name, help=summary, description=summary)
            command.set_defaults(run=partial(_list_commands, command))
            groups[name] = command.add_subparsers(metavar="COMMAND")
        elif name != wanted:
            groups[group].add_parser(last, help=summary)
        else:
            path = name.replace(" ", ".").replace("-", "_")
            module = importlib.import_module(f"deepfast.cli.{path}")
            command = groups[group].add_parser(
                last,
                help=summary,
                description=module.__doc__,
                epilog=f"example:\n  {module.EXAMPLE}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.add_arguments(command)
            command.set_defaults(run=module.run, command=name)
    args, rest = parser.parse_known_args(argv)
    # Argparse fills a list from one run of words, so overrides after an option are left over.
    if hasattr(args, "overrides"):
        args.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _replace_closed_streams(command: str) -> bool:
    """Gives a process that was started without its output streams others; returns whether standard
    output was closed and the command needs it. It then acts as a pipe that nobody reads."""
    if sys.stderr is None:
        # `print` would write errors to standard output, among the results.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- until the end
    if sys.stdout is not None:
        return False
    if command == "mt train":
        # Its results are files.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return False
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w", encoding="utf-8")
    return True
