"""Trains every system at small size on the same sentences and writes one table.

Finished runs are not run again.

python -m bench.systems --seeds 3                      # or make systems SEEDS=3
python -m bench.systems --data train.en train.de --large
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from bench.systems.one import RESULT
from bench.systems.rows import (
    LARGE,
    Row,
    named,
    text_files,
)
from bench.systems.table import page
from deepfast.measure.machine import cpu_model
from deepfast.mt.data.text import write_atomically
from deepfast.mt.training import load_recipe


def run_one(row: Row, seed: int, folder: Path, shared: tuple[str, ...]) -> dict:
    """The result of one run: read if its file exists, else the run is started.

    Raises:
        RuntimeError: if a run fails, with the end of its output.
    """
    path = folder / row.name / f"seed-{seed}" / RESULT
    overrides = row.settings(shared)
    if path.exists():
        found = json.loads(path.read_text())
        if found["overrides"] == overrides:
            return found
        raise RuntimeError(
            f"{path.parent}: expected a run with the same settings, got a run with other settings; "
            "choose another folder with --output, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.systems.one", row.recipe, str(path.parent)]
    command += [str(seed), *overrides]
    with open(path.parent / "log.txt", "a", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        said = (path.parent / "log.txt").read_text("utf-8").strip().splitlines()[-5:]
        raise RuntimeError(f"{row.name}, seed {seed}: exit {done.returncode}:\n" + "\n".join(said))
    return json.loads(path.read_text())


def machine(large: bool) -> str:
    if large:
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores, {cpu_model()}, torch {torch.__version__}"


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
        help="file for the table; default: systems.md in the folder of the runs",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for every row")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds: expected at least 1, got {args.seeds}")
    rows = named(args.rows)
    shared = LARGE if args.large else ()
    if args.data:
        shared += text_files(*args.data, args.output / "data")
    shared += tuple(args.overrides)
    for row in rows:
        # A row with a wrong setting is an error now, not after hours of training other rows.
        load_recipe(row.recipe, row.settings(shared))
    results: dict[Row, list[dict]] = {row: [] for row in rows}
    command = f"make systems SEEDS={args.seeds}" + (f" ROWS={args.rows}" if args.rows else "")
    command += f" DATA='{' '.join(p.name for p in args.data)}'" if args.data else ""
    command += f" SET={shlex.quote(' '.join(args.overrides))}" if args.overrides else ""
    path, failed = args.write or args.output / "systems.md", []
    # Every row runs once before any row runs twice, so an interrupted table has all rows.
    for seed in range(1, args.seeds + 1):
        for row in rows:
            try:
                found = run_one(row, seed, args.output, shared)
            except RuntimeError as error:
                failed.append(str(error))
                print(error, file=sys.stderr, flush=True)
                continue
            results[row].append(found)
            scored = f"BLEU {found['bleu']:.1f}" if "bleu" in found else found["diverged"]
            took = f", {found['seconds']:.0f} s" if "seconds" in found else ""
            print(f"{row.name}, seed {seed}: {scored}{took}", flush=True)
            text = page(results, args.level, command, machine(args.large))
            write_atomically(path, text.encode())
    if any(results.values()):
        print(f"the table: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"systems: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
