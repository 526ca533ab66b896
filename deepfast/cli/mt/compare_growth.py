"""Compares depth growing with its alternatives, as Wu et al. 2019 do.

The recipe has a section grow. It is trained as it is, and once more as a model of the same depth
from the start, with the steps of both runs. The table has a line for the shallow model, the deep
one that has grown on it, both together (deep-shallow decoding, weights tuned on the dev part), and
the model of equal depth: dev NLL, BLEU of the test part, parameters.

Each run is a process with a folder of its own in --output; the table is growth.md there. Ctrl-C
saves and ends all runs. The same command resumes them; finished runs are not made again."""

import argparse
import shlex

from deepfast.cli.mt.sweep import add_run_arguments, here, processes_of

EXAMPLE = "deepfast mt compare-growth phrases-growing --seeds 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, suffix="-growth")


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.files import write_atomically
    from deepfast.mt.sweep.growth import EQUAL, page, runs_of_growth
    from deepfast.mt.sweep.runs import compare
    from deepfast.mt.training.run_folder import only_run

    processes = processes_of("compare-growth", args)
    runs = runs_of_growth(args.recipe, args.overrides, args.seeds, args.output)
    words = ["mt", "compare-growth", args.recipe, *args.overrides, f"--seeds={args.seeds}"]
    folder = runs[EQUAL][0].folder.parents[1]
    with only_run(folder, "--output"):
        results = compare(runs, processes)
        text = page(results, shlex.join(["deepfast", *words]), here())
        path = folder / "growth.md"
        write_atomically(path, text.encode())
    print(*(line for line in text.splitlines() if line.startswith("|")), path, sep="\n")
    return int(any("failed" in found for own in results.values() for found in own.values()))
