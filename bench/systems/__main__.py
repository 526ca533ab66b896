"""Trains every system at small size on the same sentences and writes one table and a picture.

Finished runs are not run again.

python -m bench.systems --seeds 3                      # or make systems SEEDS=3
python -m bench.systems --jobs 4 --memory 8GiB         # several runs at once
python -m bench.systems --data train.en train.de --large
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch

from bench.systems.page import page
from bench.systems.rows import (
    LARGE,
    Row,
    named,
    text_files,
)
from deepfast.cli.sweep import add_process_arguments, process_options
from deepfast.files import require, write_atomically
from deepfast.measure.machine import cpu_model
from deepfast.measure.sweep_picture import draw
from deepfast.mt.sweep.grid import Over, Point
from deepfast.mt.sweep.runs import Result, Run, run_all
from deepfast.mt.training import load_recipe


def machine(large: bool) -> str:
    if large:
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores, {cpu_model()}, torch {torch.__version__}"


def picture(results: dict[Row, list[Result]], path: Path) -> None:
    """BLEU and dev NLL of every row that has a run, from above to below."""
    found = {row.title: runs for row, runs in results.items() if runs}
    over = Over("system", tuple(found))
    points = {Point((over,), (title,)): runs for title, runs in found.items()}
    draw(points, {point: [None] for point in points}, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--rows", help="comma-separated names; default: all")
    parser.add_argument(
        "--data", type=Path, nargs=2, metavar=("SOURCE", "TARGET"),
        help="two text files, plain or gzip, in place of generated phrases",
    )  # fmt: skip
    parser.add_argument(
        "--large", action="store_true", default=torch.cuda.is_available(),
        help="the larger settings, for a GPU; the default if there is one",
    )  # fmt: skip
    parser.add_argument("--level", type=float, default=1.0, help="dev NLL to count the steps to")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/systems"), help="folder for the runs"
    )
    parser.add_argument(
        "--write",
        type=Path,
        help="file for the table; default: systems.md in the folder of the runs. The picture, an "
        "SVG file, stands beside it",
    )
    add_process_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for every row")
    args = parser.parse_args(argv)
    try:
        processes = process_options("systems", args)
    except ValueError as error:
        parser.error(str(error))
    require("matplotlib", "drawing the systems")
    rows = named(args.rows)
    shared = LARGE if args.large else ()
    if args.data:
        shared += text_files(*args.data, args.output / "data")
    shared += tuple(args.overrides)
    # Every row runs once before any row runs twice, so an interrupted table has all rows.
    row_of = {
        Run(row.name, load_recipe(row.recipe, [*row.settings(shared), f"train.seed={seed}"]),
            args.output / row.name / f"seed-{seed}"): row
        for seed in range(1, args.seeds + 1) for row in rows
    }  # fmt: skip
    results: dict[Row, list[Result]] = {row: [] for row in rows}
    command = f"make systems SEEDS={args.seeds}" + (f" ROWS={args.rows}" if args.rows else "")
    command += f" DATA='{' '.join(p.name for p in args.data)}'" if args.data else ""
    command += f" SET={shlex.quote(' '.join(args.overrides))}" if args.overrides else ""
    command += "".join(
        f" {name.upper()}={getattr(args, name)}" for name in processes
        if getattr(args, name) != parser.get_default(name)
    )  # fmt: skip
    path, failed = args.write or args.output / "systems.md", []
    drawn = path.with_suffix(".svg")

    def report(run: Run, found: Result) -> None:
        if "failed" in found:
            failed.append(run)
            print(f"{run.name}, seed {run.seed}: {found['failed']}", file=sys.stderr, flush=True)
            return
        results[row_of[run]].append(found)
        scored = f"BLEU {found['bleu']:.1f}" if "bleu" in found else found["diverged"]
        took = f", {found['seconds']:.0f} s" if "seconds" in found else ""
        print(f"{run.name}, seed {run.seed}: {scored}{took}", flush=True)
        text = page(results, args.level, command, machine(args.large), drawn.name)
        write_atomically(path, text.encode())

    try:
        run_all(list(row_of), report, **processes)
    finally:
        if any(results.values()):
            picture(results, drawn)
            print(f"the table: {path}\nthe picture: {drawn}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"systems: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
