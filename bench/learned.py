"""Learning experiments: a row of `bench/results/learned.csv` for each run.

`python -m bench learned FOLDER RECIPE` adds the runs of a folder that `deepfast mt sweep RECIPE`
wrote. They take hours, so `python -m bench all` only draws what the file has.
"""

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from bench.results import FOLDER, write_csv
from deepfast.mt.sweep.grid import systems
from deepfast.mt.sweep.runs import RECIPE, read_result
from deepfast.mt.training.report import read_metrics

POINTS = 10
"""Of a curve."""


def thinned(curve: Sequence[tuple[int, float]]) -> str:
    """At most `POINTS` points as text, the last one among them: "200:4.051 400:3.213"."""
    every = max(1, math.ceil(len(curve) / POINTS))
    return " ".join(f"{step}:{nll:.4g}" for step, nll in curve[::-1][::every][::-1])


def digest(settings: dict) -> str:
    """Eight letters that are the same for runs that differ in their seed alone."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def runs(folder: Path, recipe: str) -> Iterator[dict]:
    """The rows of a sweep's folder."""
    try:
        points = systems(recipe)
    except ValueError:
        points = []
    names = {p.folder: p.name for point in points for p in (point, *point.pilots)}
    for path in sorted(folder.rglob("result.json")):
        seed = int(path.parent.name.removeprefix("seed-"))
        found = read_result(path.parent, seed) or {}
        settings = yaml.safe_load((path.parent / RECIPE).read_text("utf-8"))
        settings |= {"output": None, "train": settings["train"] | {"seed": None}}
        name = path.parents[1].name
        pilots = " pilots" if path.parents[2].name == "pilots" else ""
        curve = [(r["step"], r["nll"]) for r in read_metrics(path.parent) if r["event"] == "valid"]
        machine = found["machine"]
        yield {
            "experiment": recipe + pilots, "system": names.get(name, name), "seed": seed,
            "steps": found["step"], "nll": f"{found['nll']:.5g}",
            "test_bleu": "" if found["test_bleu"] is None else f"{found['test_bleu']:.4g}",
            "parameters": found["parameters"], "seconds": round(found["seconds"]),
            "settings": digest(settings), "processor": machine["cpu"], "date": machine["date"][:10],
            "commit": machine["commit"], "command": f"deepfast mt sweep {recipe}",
            "curve": thinned(curve),
        }  # fmt: skip


def add(rows: Sequence[dict], path: Path = FOLDER / "learned.csv") -> None:
    """Writes the rows behind those of the file, or over those of the same system and seed."""
    merged = {_name(row): row for row in [*(read(path) if path.exists() else []), *rows]}
    write_csv(list(merged.values()), path)


def _name(row: dict) -> tuple:
    return row["experiment"], row["system"], str(row["seed"])


def read(path: Path = FOLDER / "learned.csv") -> list[dict]:
    """The rows, whose numbers are numbers, and None where there is none."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {"seed": int(row["seed"]), "steps": int(row["steps"])}
        row |= {name: float(row[name]) if row[name] else None for name in ("nll", "test_bleu")}
    return rows
