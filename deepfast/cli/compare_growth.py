"""Compares depth growing with its alternatives, as Wu et al. 2019 do.

The recipe has a section grow. It is trained as it is, and once more as a model of the same depth
from the start, with the steps of both runs. The table has a line for the shallow model, the deep
one that has grown on it, both together (deep-shallow decoding, weights tuned on the dev part), and
the model of equal depth: dev NLL, BLEU of the test part, parameters.

Each run is a process with a folder of its own in --output; the table is growth.md there. Ctrl-C
saves and ends all runs. The same command resumes them; finished runs are not made again."""

import argparse
import shlex
from pathlib import Path

from deepfast.cli.sweep import add_process_arguments, here, in_words, process_options

EXAMPLE = "deepfast compare-growth phrases-growing --seeds 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a name from deepfast train --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind; default: 1")
    add_process_arguments(parser)
    parser.add_argument(
        "--output", type=Path, help="folder; default: the recipe's output with -growth at its end"
    )


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.files import write_atomically
    from deepfast.measure.machine import environment
    from deepfast.mt.sweep.growth import page, runs_of_growth
    from deepfast.mt.sweep.runs import run_all
    from deepfast.mt.training.lock import only_run

    options = process_options("compare-growth", args)
    runs = runs_of_growth(args.recipe, args.overrides, args.seeds, args.output)
    results: dict = {}

    def report(run, found: dict) -> None:
        results[run] = found
        print(f"{run.name}, seed {run.seed}: {in_words(found)}", flush=True)

    command = ["deepfast", "compare-growth", args.recipe, *args.overrides, f"--seeds={args.seeds}"]
    folder = runs[0].folder.parents[1]
    with only_run(folder, "--output"):
        run_all(runs, report, **options)
        ordered = {run: results[run] for run in runs}
        text = page(ordered, shlex.join(command), here(environment()))
        path = folder / "growth.md"
        write_atomically(path, text.encode())
    print(*(line for line in text.splitlines() if line.startswith("|")), path, sep="\n")
    return int(any("failed" in found for found in results.values()))
