"""Trains a recipe once for every value of a key and every seed, and compares the runs.

--over KEY=VALUE,VALUE may be repeated: then every combination is a point. A value is YAML, as in
key=value of deepfast train; commas inside brackets, braces and quotes belong to it. So a value may
be a list, or several keys of a section:

  --over "optim.betas=[0.9, 0.98],[0.9, 0.999]"
  --over "model.dlcl={},{norm: null},{learnable: false, init: one}"

Each run is a process with a folder of its own in --output. The folder gets sweep.md, a table with
mean and standard deviation; sweep.svg, BLEU and dev NLL over the first key, with a curve for each
combination of the others; and sweep.json. A run that diverges or fails is a line of the table.

Ctrl-C saves and ends all runs. The same command resumes them; finished runs are not made again.
Where a recipe has test pairs, runs translate them at the end, unless train.test_bleu=false is
given."""

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

from deepfast import checks
from deepfast.memory.units import parse_bytes

EXAMPLE = "deepfast sweep phrases-dlcl30 --over model.encoder_layers=6,12,20,30 --seeds 3"

EVERY = 5
"""Seconds at least between two writings of the files before the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a name from deepfast train --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    parser.add_argument(
        "--over", action="append", required=True, metavar="KEY=VALUE,VALUE",
        help="a key of the recipe and its values; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, help="runs of each point; default: 1")
    add_process_arguments(parser)
    parser.add_argument(
        "--output", type=Path, help="folder; default: the recipe's output with -sweep at its end"
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the processes that make runs."""
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; default: 1")
    parser.add_argument(
        "--threads", type=int,
        help="CPU threads of each process; default: the cores divided by --jobs",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="BYTES",
        help="such as 8GiB: start only as many processes as fit, by the peak that the largest "
        "run so far had; the run with the most parameters begins, alone. On a GPU its memory",
    )  # fmt: skip


def process_options(op: str, args: argparse.Namespace) -> dict[str, Any]:
    """These arguments as `deepfast.mt.sweep.runs.run_all` takes them; checked, as is --seeds."""
    checks.whole(op, seeds=args.seeds, jobs=args.jobs)
    if args.threads is not None:
        checks.whole(op, most=checks.MOST_THREADS, threads=args.threads)
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    return {"jobs": args.jobs, "threads": args.threads, "memory": memory}


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.files import require
    from deepfast.mt.sweep.grid import parse_over, points, runs_of
    from deepfast.mt.sweep.runs import run_all
    from deepfast.mt.training.lock import only_run

    options = process_options("sweep", args)
    require("matplotlib", "drawing a sweep")
    chosen = points([parse_over(text) for text in args.over])
    runs = runs_of(args.recipe, args.overrides, chosen, args.seeds, args.output)
    folder = runs[chosen[0]][0].folder.parents[1]
    keys = [over.key for over in chosen[0].overs]
    writer = _Writer(args, folder, runs)
    # Every point runs once before any point runs twice, so an interrupted table has all points.
    in_turns = [run for seed in zip(*runs.values(), strict=True) for run in seed]
    with only_run(folder, "--output"):
        _check_keys(folder / "sweep.json", keys)
        try:
            run_all(in_turns, writer, **options)
        finally:
            writer.write()
    for name in ("sweep.md", "sweep.svg", "sweep.json"):
        print(folder / name)
    return int(writer.failed)


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


class _Writer:
    """Collects results, prints a line for each, and writes the files."""

    def __init__(self, args: argparse.Namespace, folder: Path, runs: dict):
        from deepfast.measure.machine import environment

        self.folder, self.runs = folder, runs
        self.results: dict = {point: [] for point in runs}
        self.point_of = {run: point for point, own in runs.items() for run in own}
        words = [args.recipe, *args.overrides, *(f"--over={text}" for text in args.over)]
        self.command = shlex.join(["deepfast", "sweep", *words, f"--seeds={args.seeds}"])
        self.machine = environment()
        self.written = time.monotonic()

    @property
    def failed(self) -> bool:
        return any("failed" in found for own in self.results.values() for found in own)

    def __call__(self, run, found: dict) -> None:
        own = self.results[self.point_of[run]]
        own.append(found)
        own.sort(key=lambda result: result["seed"])
        print(f"{run.name}, seed {run.seed}: {in_words(found)}", flush=True)
        # Drawing takes about a second, and many results may have been there before.
        if time.monotonic() > self.written + EVERY:
            self.write()

    def write(self) -> None:
        from deepfast.files import write_atomically
        from deepfast.measure.sweep_picture import draw
        from deepfast.mt.sweep.table import page

        known = {point: found for point, found in self.results.items() if found}
        if not known:
            return
        text = page(known, self.command, here(self.machine))
        write_atomically(self.folder / "sweep.md", text.encode())
        content = {
            "command": self.command,
            "machine": self.machine,
            "over": {over.key: over.values for over in next(iter(known)).overs},
            "points": [
                {"values": dict(zip((o.key for o in point.overs), point.values, strict=True)),
                 "runs": found} for point, found in known.items()
            ],
        }  # fmt: skip
        write_atomically(self.folder / "sweep.json", json.dumps(content, indent=1).encode())
        numbers = {point: point.numbers(own[0].recipe) for point, own in self.runs.items()}
        draw(known, numbers, self.folder / "sweep.svg")
        self.written = time.monotonic()


def here(machine: dict) -> str:
    """This machine in words, from `deepfast.measure.machine.environment`."""
    import torch

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    return f"{gpu}{cores}, {machine['cpu']}, torch {machine['torch']}"


def in_words(found: dict) -> str:
    """A result as one line."""
    if "failed" in found:
        return f"failed, {found['failed']}"
    if "diverged" in found:
        return f"diverged, {found['diverged']}"
    parts = [f"BLEU {found['bleu']:.1f}"] if found["bleu"] is not None else []
    parts += [f"dev NLL {found['nll']:.3f}"] if found["nll"] is not None else []
    return ", ".join([*parts, f"{found['seconds']:.0f} s"])
