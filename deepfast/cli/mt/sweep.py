"""Trains a recipe once for every value of a key and every seed, and compares the runs.

--over KEY=VALUE,VALUE may be repeated: then every combination is a point. A value is YAML, as in
key=value of deepfast mt train; commas inside brackets, braces and quotes belong to it. So a value
may be a list, or several keys of a section:

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
from pathlib import Path
from typing import Any

from deepfast import checks
from deepfast.memory.units import parse_bytes

EXAMPLE = "deepfast mt sweep phrases-dlcl30 --over model.encoder_layers=6,12,20,30 --seeds 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over", action="append", required=True, metavar="KEY=VALUE,VALUE",
        help="a key of the recipe and its values; may be repeated",
    )  # fmt: skip
    add_run_arguments(parser, suffix="-sweep")


def add_run_arguments(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Adds the arguments of a command that runs a recipe many times; ``suffix`` ends the name of
    its folder."""
    parser.add_argument("recipe", help="a YAML file, or a name from deepfast mt train --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each; default: 1")
    add_process_arguments(parser)
    help = f"folder; default: the recipe's output with {suffix} at its end"
    parser.add_argument("--output", type=Path, help=help)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the processes that make runs."""
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; default: 1")
    text = "CPU threads of each process; default: the cores divided by --jobs"
    parser.add_argument("--threads", type=int, help=text)
    parser.add_argument(
        "--memory-limit", metavar="BYTES",
        help="such as 8GiB: start only as many processes as fit, by the peak that the largest "
        "run so far had; the run with the most parameters begins, alone. On a GPU its memory",
    )  # fmt: skip


def processes_of(op: str, args: argparse.Namespace) -> Any:
    """These arguments as `deepfast.mt.sweep.runs.Processes`; checked, as is --seeds."""
    checks.whole(op, seeds=args.seeds, jobs=args.jobs)
    if args.threads is not None:
        checks.whole(op, most=checks.MOST_THREADS, threads=args.threads)
    memory = None if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    from deepfast.mt.sweep.runs import Processes

    return Processes(args.jobs, args.threads, memory)


def run(args: argparse.Namespace) -> int:
    # torch takes a second to import.
    from deepfast.files import require, write_atomically
    from deepfast.measure.machine import environment
    from deepfast.measure.sweep_picture import draw
    from deepfast.mt.sweep.grid import points, runs_of
    from deepfast.mt.sweep.runs import compare
    from deepfast.mt.sweep.table import page
    from deepfast.mt.training.run_folder import only_run

    processes = processes_of("sweep", args)
    require("matplotlib", "drawing a sweep")
    chosen = points(args.over)
    runs = runs_of(args.recipe, args.overrides, chosen, args.seeds, args.output)
    folder = runs[chosen[0]][0].folder.parents[1]
    words = [args.recipe, *args.overrides, *(f"--over={text}" for text in args.over)]
    command = shlex.join(["deepfast", "mt", "sweep", *words, f"--seeds={args.seeds}"])
    machine = environment()
    values = {key: list(dict.fromkeys(point.values[at] for point in chosen))
              for at, key in enumerate(chosen[0].keys)}  # fmt: skip

    def write(results: dict) -> None:
        known = {point: list(own.values()) for point, own in results.items() if own}
        content = {
            "command": command,
            "machine": machine,
            "over": values,
            "points": [{"values": dict(p.changes), "runs": own} for p, own in known.items()],
        }
        write_atomically(folder / "sweep.md", page(known, command, here()).encode())
        write_atomically(folder / "sweep.json", json.dumps(content, indent=1).encode())
        draw(known, chosen, folder / "sweep.svg")

    with only_run(folder, "--output"):
        _check_keys(folder / "sweep.json", list(values))
        results = compare(runs, processes, write)
    for name in ("sweep.md", "sweep.svg", "sweep.json"):
        print(folder / name)
    return int(any("failed" in found for own in results.values() for found in own.values()))


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


def here() -> str:
    """This machine in words."""
    import torch

    from deepfast.measure.machine import cpu_model
    from deepfast.mt.sweep.runs import cores

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    plural = "s" * (cores() != 1)
    return f"{gpu}{cores()} core{plural}, {cpu_model()}, torch {torch.__version__}"
