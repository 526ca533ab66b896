"""Trains a translation model from a recipe: a YAML file, or the name of one that is shipped.

key=value replaces a value of the recipe. An output folder with an earlier run is refused without
resume=true, which continues from its newest checkpoint, or starts if there is none. Ctrl-C, SIGTERM
or SIGHUP finishes the step, writes a checkpoint and exits with 130, 143 or 129; under nohup SIGHUP
stays ignored. On several GPUs:
torchrun --standalone --nproc-per-node 8 -m deepfast mt train RECIPE."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from deepfast.cli.outputs import flush_output, replaces

EXAMPLE = "deepfast mt train phrases-dlcl30 model.encoder_layers=60 optim.lr=2e-3 output=runs/deep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a YAML file, or a name from --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optim.lr=2e-3")
    parser.add_argument("--list", action="store_true", help="print the recipes that are shipped")
    parser.add_argument("--print", action="store_true", help="print the whole recipe and stop")


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.mt import training

    if args.list:
        names = training.recipe_names()
        for name, summary in names.items():
            print(f"{name:{max(map(len, names))}}  {summary}")
        return 0
    if args.recipe is None:
        raise ValueError("expected a recipe, got none: see deepfast mt train --list")
    # Only the first rank prints; before the ranks connect, the first rank of each machine.
    rank = os.environ.get("RANK", "0")
    try:
        recipe = training.load_recipe(args.recipe, args.overrides)
    except training.RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 1
        raise training.RecipeError(f"rank {rank}: {error}" if rank != "0" else error) from error
    if args.print:
        print(training.dump_recipe(recipe), end="")
        return 0
    if not recipe.resume and replaces(Path(recipe.output, "recipe.yaml"), args.recipe):
        raise ValueError(
            f"output: expected a folder where {args.recipe} is not replaced, got {recipe.output}; "
            "resume=true continues its run"
        )
    try:
        return _train(recipe, first=rank == "0")
    finally:
        # A run goes on without its standard output, and its exit code says how it ended.
        flush_output()


def _train(recipe, first: bool) -> int:
    """Trains; returns the exit code."""
    from deepfast.cli.mt.decoding import to_translate
    from deepfast.mt import training
    from deepfast.mt.training.environment import SIGNALS
    from deepfast.mt.training.errors import OtherRankError

    try:
        result = training.train(recipe)
    except OtherRankError:
        return 1
    except KeyboardInterrupt:
        # Before the first step there is nothing to save, and a second Ctrl-C does not wait for a
        # save.
        print("deepfast mt train: interrupted, no further checkpoint was written", file=sys.stderr)
        return SIGNALS["SIGINT"]
    if first and result.stopped not in SIGNALS:
        language = ["--language", recipe.data.tagged[0]] if recipe.data.tagged else []
        with contextlib.suppress(OSError):
            print(to_translate(result.for_translation, *language))
    return SIGNALS.get(result.stopped, 0)
