"""Trains a recipe once for every value of a key and every seed, and compares the runs.

What is compared is either the section sweep of the recipe's file: systems by name, each with its
keys, seeds, and pilots that choose a rate for each (`deepfast.mt.sweep.grid` shows one); or
--over KEY=VALUE,VALUE. That may be repeated: then every combination is a point. A value is YAML, as
in key=value of deepfast mt train; commas inside brackets, braces and quotes belong to it. So a
value may be a list, or several keys of a section:

  --over "optim.betas=[0.9, 0.98],[0.9, 0.999]"
  --over "model.dlcl={},{norm: null},{learnable: false, init: one}"

The plan comes first: 20 steps of every point are measured and tell the hours and the memory. With
--plan the command ends there.

Each run is a process with a folder of its own in --output. The folder gets sweep.md, a page with
the mean over the seeds and the difference to the first point, each with its spread; sweep.svg, BLEU
and dev NLL; sweep_curves.svg, dev NLL over steps and time; sweep_gradients.svg, the norms of the
gradients of the layers at the first and the last step; and sweep.json. A run that diverges or
fails is counted there.

Ctrl-C saves and ends all runs. The same command resumes them; finished runs are not made again: the
files settings.json and result.json of a run are enough for that. Where a recipe has test pairs,
runs translate them at the end, unless train.test_bleu=false is given."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepfast import checks
from deepfast.memory.units import parse_bytes

if TYPE_CHECKING:
    from deepfast.mt.sweep.grid import Point
    from deepfast.mt.sweep.runs import Run

EXAMPLE = "deepfast mt sweep phrases-dlcl30 --over model.encoder_layers=6,12,20,30 --seeds 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over",
        action="append",
        metavar="KEY=VALUE,VALUE",
        help="a key of the recipe and its values; may be repeated; default: the recipe's systems",
    )
    parser.add_argument("recipe", help="a YAML file, or a name from deepfast mt train --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="a system whose runs are made; may be repeated; the page has all finished runs",
    )
    parser.add_argument("--seeds", type=int, help="runs of each; default: the recipe's, or 1")
    parser.add_argument("--plan", action="store_true", help="end after the plan")
    help = "folder; default: the recipe's output with -sweep at its end"
    parser.add_argument("--output", type=Path, help=help)
    text = "processes at once; default: 1; 0 starts none and writes the page of the finished runs"
    parser.add_argument("--jobs", type=int, default=1, help=text)
    text = "CPU threads of each process; default: the cores divided by --jobs"
    parser.add_argument("--threads", type=int, help=text)
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        help="such as 8GiB: start only as many processes as fit, by the peak that the largest "
        "run so far had; the run with the most parameters begins, alone. On a GPU its memory",
    )


def _processes(args: argparse.Namespace) -> Any:
    """These arguments as `deepfast.mt.sweep.runs.Processes`; checked, as is --seeds."""
    checks.whole("sweep", 0, jobs=args.jobs)
    if args.seeds is not None:
        checks.whole("sweep", seeds=args.seeds)
    if args.threads is not None:
        checks.whole("sweep", most=checks.MOST_THREADS, threads=args.threads)
    memory = None if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    from deepfast.mt.sweep.runs import Processes

    return Processes(args.jobs, args.threads, memory)


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.files import require, write_atomically
    from deepfast.machine import environment
    from deepfast.measure.sweep_picture import write_page
    from deepfast.mt.sweep.grid import named, points, runs_of, systems
    from deepfast.mt.sweep.stages import Sweep
    from deepfast.mt.training import RecipeError
    from deepfast.mt.training.run_folder import only_run

    processes = _processes(args)
    if args.plan and not args.jobs:
        raise ValueError("--plan: expected --jobs of at least 1 beside it, got 0")
    require("matplotlib", "drawing a sweep")
    if args.over and args.only:
        raise RecipeError("--only: expected no --over beside it, which has no names")
    chosen, seeds, pilots = (points(args.over), 1, None) if args.over else systems(args.recipe)
    if args.seeds is not None:
        chosen, seeds = [replace(point, seeds=None) for point in chosen], args.seeds
    only = named(chosen, args.only or ())

    def runs(point: Point, seeds: int, where: Path | None) -> list[Run]:
        (own,) = runs_of(args.recipe, args.overrides, [point], seeds, where).values()
        return own

    (first, *_) = runs(chosen[0], seeds, args.output)
    folder, own = first.folder.parents[1], first.recipe.train.threads
    if args.threads is not None and own not in (None, args.threads):
        raise RecipeError(f"--threads: expected train.threads={args.threads}, got {own}")

    def trial(pilot: Point) -> Run:
        # Behind what the system sets itself.
        own = (*pilot.own, f"train.max_steps={pilots.steps}", "train.test_bleu=false")
        return runs(replace(pilot, seeds=1, own=own), 1, folder / "pilots")[0]

    words = [args.recipe, *args.overrides, *(f"--over={text}" for text in args.over or ())]
    words += [f"--seeds={args.seeds}"] if args.seeds is not None else []
    command = shlex.join(["deepfast", "mt", "sweep", *words])
    machine = environment()
    values = {
        key: list(dict.fromkeys(point.values[at] for point in chosen))
        for at, key in enumerate(chosen[0].keys)
    }

    def write(results: dict, tried: dict) -> None:
        content = {
            "command": command,
            "machine": machine,
            "over": values,
            "points": [
                {"values": dict(point.changes), "runs": own}
                for point, own in results.items()
                if own
            ],
        }
        write_page(folder, results, command, pilots, tried)
        write_atomically(folder / "sweep.json", json.dumps(content, indent=1).encode())

    with only_run(folder, "--output"):
        _check_keys(folder / "sweep.json", list(values))
        sweep = Sweep(chosen, lambda point: runs(point, seeds, folder), pilots, trial, write, only)
        planned = sweep.plan(processes, folder) if args.jobs else None
        if planned is not None or args.plan:
            print(planned or "plan: nothing to measure: no run is left, or all are short")
        if args.plan:
            return 0
        succeeded = sweep.make(processes)
    for path in sorted(folder.glob("sweep*")):
        print(path)
    return int(not succeeded)


def _check_keys(path: Path, keys: list[str]) -> None:
    """Refuses a folder with the files of a sweep over other keys."""
    from deepfast.mt.sweep.runs import read_object

    if path.exists():
        other = list(read_object(path, over=dict)["over"])
        if other != keys:
            raise ValueError(
                f"{path.parent}: expected a sweep over {', '.join(keys)}, got one over "
                f"{', '.join(other)}; choose another folder with --output, or remove it"
            )
