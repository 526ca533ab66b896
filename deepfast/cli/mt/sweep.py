"""Trains a recipe once for every value of a key and every seed, and compares the runs.

What is compared is either the section sweep of the recipe's file: systems by name, each with its
keys, seeds, and pilots that choose a rate for each (`deepfast.mt.sweep.grid` shows one); or
--over KEY=VALUE,VALUE. That may be repeated: then every combination is a system. The values are
elements of a list of YAML. So a value may be a list, or several keys of a section:

  --over "optim.betas=[0.9, 0.98],[0.9, 0.999]"
  --over "model.dlcl={},{norm: null},{learnable: false, init: one}"

The plan comes first: 20 steps of every system are measured and tell the hours and the memory. With
--plan the command ends there.

Each run is a `deepfast mt train` of its own, with its recipe, log and checkpoints in a folder in
--output. On a machine with several GPUs each run has one of them. The folder of the sweep gets
sweep.md, a page with the mean over the seeds and the difference to the first system, each with its
spread; and sweep.svg, BLEU and dev NLL of each seed. A run that diverges or fails is counted there.

Ctrl-C saves and ends all runs. The same command resumes them; finished runs are not made again: the
files recipe.yaml and result.json of a run are enough for that. Where a recipe has test pairs, runs
translate them at the end, unless train.test_bleu=false is given."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from deepfast import checks

EXAMPLE = "deepfast mt sweep phrases-dlcl30 --over model.encoder_layers=6,12,20,30 --seeds 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a key of the recipe and its values; may be repeated; default: the recipe's systems"
    parser.add_argument("--over", action="append", metavar="KEY=VALUE,VALUE", help=text)
    parser.add_argument("recipe", help="a YAML file, or a name from deepfast mt train --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    text = "a system whose runs are made; may be repeated; the page has all finished runs"
    parser.add_argument("--only", action="append", metavar="NAME", help=text)
    parser.add_argument("--seeds", type=int, help="runs of each; default: the recipe's, or 1")
    parser.add_argument("--plan", action="store_true", help="end after the plan")
    text = "folder; default: the recipe's output with -sweep at its end"
    parser.add_argument("--output", type=Path, help=text)
    text = "processes at once, which share the cores; default: 1; 0 starts none and writes the page"
    parser.add_argument("--jobs", type=int, default=1, help=text)


def run(args: argparse.Namespace) -> int:
    checks.whole("sweep", 0, jobs=args.jobs)
    if args.seeds is not None:
        checks.whole("sweep", seeds=args.seeds)
    # torch takes a second to import.
    from deepfast.files import require
    from deepfast.measure.sweep_picture import write_page
    from deepfast.mt.sweep.grid import named, points, systems
    from deepfast.mt.sweep.stages import Results, Sweep
    from deepfast.mt.training.run_folder import only_run

    require("matplotlib", "drawing a sweep")
    require("scipy", "the intervals of a sweep")
    chosen = points(args.over) if args.over else systems(args.recipe)
    if args.seeds is not None:
        chosen = [replace(point, seeds=args.seeds) for point in chosen]
    only = named(chosen, args.only or ())
    sweep = Sweep(args.recipe, args.overrides, chosen, args.output)
    words = [args.recipe, *args.overrides, *(f"--over={text}" for text in args.over or ())]
    words += [f"--seeds={args.seeds}"] if args.seeds is not None else []
    command = shlex.join(["deepfast", "mt", "sweep", *words])

    def write(results: Results, pilots: Results) -> None:
        write_page(sweep.folder, results, pilots, command)

    with only_run(sweep.folder, "--output"):
        planned = sweep.plan(only, args.jobs) if args.jobs else None
        if planned is not None or args.plan:
            print(planned or "plan: no run is left")
        if args.plan:
            return 0
        succeeded = sweep.make(only, args.jobs, write)
    for path in sorted(sweep.folder.glob("sweep*")):
        print(path)
    return int(not succeeded)
