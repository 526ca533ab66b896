"""Trains every system at small size on the same sentences and writes one table and a picture.

Finished runs are not run again.

python -m bench.systems --seeds 3                      # or make systems SEEDS=3
python -m bench.systems --jobs 4 --memory-limit 8GiB         # several runs at once
python -m bench.systems --data train.en train.de --large
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch

from bench.systems.page import page
from bench.systems.rows import LARGE, Row, named, text_files
from deepfast.cli.mt.sweep import add_process_arguments, here, processes_of
from deepfast.files import require, write_atomically
from deepfast.measure.sweep_picture import draw
from deepfast.mt.sweep.grid import Point
from deepfast.mt.sweep.runs import Result, Run, compare, seeded


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
        "--output", type=Path, default=Path("runs/systems"),
        help="folder for the runs, the table systems.md and its picture",
    )  # fmt: skip
    add_process_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for every row")
    args = parser.parse_args(argv)
    try:
        processes = processes_of("systems", args)
    except ValueError as error:
        parser.error(str(error))
    require("matplotlib", "drawing the systems")
    rows = named(args.rows)
    shared = LARGE if args.large else ()
    if args.data:
        shared += text_files(*args.data, args.output / "data")
    shared += tuple(args.overrides)
    runs = {
        row: seeded(row.name, row.recipe, row.settings(shared), args.seeds, args.output / row.name)
        for row in rows
    }
    command = f"make systems SEEDS={args.seeds}" + (f" ROWS={args.rows}" if args.rows else "")
    command += f" DATA='{' '.join(p.name for p in args.data)}'" if args.data else ""
    command += f" SET={shlex.quote(' '.join(args.overrides))}" if args.overrides else ""
    command += "".join(
        f" {name.upper()}={getattr(args, name)}" for name in ("jobs", "threads", "memory_limit")
        if getattr(args, name) != parser.get_default(name)
    )  # fmt: skip
    path = args.output / "systems.md"

    def write(results: dict[Row, dict[Run, Result]]) -> None:
        """The table and BLEU and dev NLL of every row that has a run."""
        ended = {row: [found for found in own.values() if "failed" not in found]
                 for row, own in results.items()}  # fmt: skip
        ended = {row: found for row, found in ended.items() if found}
        if not ended:
            return
        drawn = path.with_suffix(".svg")
        write_atomically(path, page(ended, args.level, command, here(), drawn.name).encode())
        points = {Point((("system", row.title),)): found for row, found in ended.items()}
        draw(points, list(points), drawn)

    try:
        results = compare(runs, processes, write)
    finally:
        if path.exists():
            print(f"the table: {path}\nthe picture: {path.with_suffix('.svg')}")
    return int(any("failed" in found for own in results.values() for found in own.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"systems: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
