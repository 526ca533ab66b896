"""Numbers of the committed sweeps: what their systems cost, and what their rows say.

    python -m bench.sweeps cost multi30k-depth data.train_source=TEXT/train.en ... --rounds 30
    python -m bench.sweeps rows multi30k-depth bench/results/depth
    python -m bench.sweeps cut multi30k-depth runs/multi30k-depth-sweep

`cost`: all systems of a recipe, or the first and those of `--only`, take turns in one process with
a training step on the same batch, one thread. `rows`: mean and standard deviation of dev NLL and
BLEU, their difference to the baseline and those of `PAIRS` with 95% t intervals, and the picture of
dev NLL over that time. `cut`: what the layers above a number give to the output of DLCL, from the
checkpoints that a sweep leaves. All write to bench/results/results.csv.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from bench.record import read, record
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.measure.pictures import WIDTH
from deepfast.measure.pictures import picture as drawing
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.sweep.grid import Point, named, systems
from deepfast.mt.sweep.runs import RECIPE, Result, read_result
from deepfast.mt.sweep.stages import Sweep
from deepfast.mt.sweep.table import differences, interval, known
from deepfast.mt.training import load_recipe
from deepfast.mt.training.corpus import load_corpus
from deepfast.mt.training.report import read_metrics
from deepfast.mt.training.run_folder import BEST
from deepfast.mt.training.trainer import Trainer

COLORS = ("#0b6e4f", "#d55e00", "#0072b2", "#e69f00", "#b8548f", "#7a7a7a", "#56b4e9", "#000000")
LINES = ("-", "--", ":", "-.")
Curve = list[tuple[int, float]]
MEASURES = {"nll": ("nll", 3, "nats/token"), "bleu": ("test_bleu", 1, "BLEU")}
"""Name of a number -> its key in a result, its digits and its unit."""
PAIRS = (
    ("DLCL, 30 layers", "DLCL, 6 layers"),
    ("attention residuals, 30 layers", "attention residuals, 6 layers"),
    ("DLCL, 30 layers", "attention residuals, 30 layers"),
    ("DLCL, 6 layers", "pre-norm, 6 layers"),
    ("attention residuals, 6 layers", "pre-norm, 6 layers"),
    ("DLCL, 30 layers", "pre-norm, warm-up 1000, 30 layers"),
    ("attention residuals, 30 layers", "pre-norm, warm-up 1000, 30 layers"),
    ("pre-norm, 6 layers", "pre-norm, 1 layer"),
    ("DLCL, 6 layers", "pre-norm, 1 layer"),
    ("DLCL, 24 layers", "DLCL, 6 layers"),
    ("attention residuals, 24 layers", "attention residuals, 6 layers"),
)
"""Systems that are compared with another one than the first."""


def words(text: str) -> str:
    return re.sub(r"\W+", "_", text).lower()


def key(recipe: str, point: Point, what: str) -> str:
    """The key of a number in the file of results."""
    return f"{words(f'{recipe}_{point.name}')}_{what}"


def cost(recipe: str, overrides: list[str], only: list[str], rounds: int) -> None:
    """Records the time and the peak memory of a step of every system."""
    torch.set_num_threads(1)
    keep_memory()
    chosen = systems(recipe)
    first = chosen[0]
    chosen = list(dict.fromkeys([first, *named(chosen, only)]))
    sweep, trainers = Sweep(recipe, overrides, chosen), {}
    for point in chosen:
        run = sweep.run(point, 1)
        # A corpus of its own, so that all see the same batches.
        corpus = load_corpus(run.recipe.data, seed=1, folder=None)
        trainers[point] = Trainer(run.recipe, corpus, torch.device("cpu"))
    steps = {point: trainer.train_step for point, trainer in trainers.items()}
    seconds = interleave(steps, repeats=rounds)
    peaks = {point: trainer.measure() for point, trainer in trainers.items()}
    command = f"python -m bench.sweeps cost {recipe}"
    for point in chosen:
        over = f"{point.name} over {first.name}, {rounds} rounds"
        took, peak = ratio(seconds[point], seconds[first]), peaks[point] / peaks[first]
        record(key(recipe, point, "step"), took, "x", f"training step: {over}", command)
        what = f"peak of a step with parameters and Adam: {over}"
        record(key(recipe, point, "peak"), peak, "x", what, command, "any")


def half(values: list[float], digits: int) -> str:
    """Half of the 95% t interval; nothing for fewer than two values."""
    bounds = interval(values)
    return f"± {(bounds[1] - bounds[0]) / 2:.{digits}f}" if bounds else ""


def cut(recipe: str, folder: Path, name: str, layers: list[int]) -> None:
    """Records the dev NLL of a DLCL system's checkpoints where the encoder's output reads no layer
    above a number, less that of the whole encoder."""
    torch.set_num_threads(1)
    (point,) = named(systems(recipe), [name])
    found: dict[int | None, list[float]] = {}
    for place in sorted((folder / point.folder).glob("seed-*")):
        loaded, _ = load_model(place / BEST)
        plain = load_recipe(place / RECIPE)
        corpus = load_corpus(plain.data, seed=plain.train.seed, folder=None)
        trainer = Trainer(plain, corpus, torch.device("cpu"))
        trainer.model.load_state_dict(loaded.state_dict())
        output = trainer.model.encoder.connection.dlcl.weight.data[-1]
        kept = output.clone()
        for layer in (None, *layers):
            output.copy_(kept)
            if layer is not None:
                output[layer + 1 :] = 0
            found.setdefault(layer, []).append(trainer.validate().nll)
    for layer in layers:
        over = [cut - whole for cut, whole in zip(found[layer], found[None], strict=True)]
        what = (f"dev NLL of {name} where the output reads no layer above {layer}, less that of "
                f"the whole encoder, {len(over)} seeds")  # fmt: skip
        mean, spread = round(statistics.mean(over), 3) + 0.0, half(over, 3)
        command = f"python -m bench.sweeps cut {recipe} FOLDER"
        record(key(recipe, point, f"cut_{layer}"), mean, "nats/token", what, command, "any", spread)


def rows(folder: Path, point: Point) -> list[Result]:
    """The results of a system's runs in a sweep's folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected the folder of a sweep, got none")
    places = sorted((folder / point.folder).glob("seed-*"))
    return [read_result(place, int(place.name.removeprefix("seed-"))) for place in places]


def values(recipe: str, folder: Path) -> dict[str, tuple[float, str, str, str]]:
    """Key of a number -> the number, what stands behind it, its unit, and what it is."""
    chosen = systems(recipe)
    called, found = {point.name: point for point in chosen}, {}
    runs = {point: rows(folder, point) for point in chosen}
    for point in chosen:
        for name, (field, digits, unit) in MEASURES.items():
            own = known(runs[point], field)
            if own:
                spread = f"± {statistics.stdev(own):.{digits}f}" if len(own) > 1 else ""
                what = f"{name} of {point.name}, {len(own)} seeds, {recipe}"
                mean = round(statistics.mean(own), digits)
                found[key(recipe, point, name)] = mean, spread, unit, what
    pairs = [(point, chosen[0], "") for point in chosen[1:]]
    pairs += [(called[ours], called[theirs], "_" + words(theirs))
              for ours, theirs in PAIRS if {ours, theirs} <= called.keys()]  # fmt: skip
    for point, base, behind in pairs:
        for name, (field, digits, unit) in MEASURES.items():
            less = differences(runs[point], runs[base], field)
            spread = half(less, digits)
            if not spread:
                continue
            what = f"{name} of {point.name} less {base.name}, {len(less)} seeds, {recipe}"
            found[key(recipe, point, f"{name}_less{behind}")] = (
                round(statistics.mean(less), digits), spread, unit, what,
            )  # fmt: skip
    return found


def picture(recipe: str, folder: Path, path: Path) -> bool:
    """Draws dev NLL over steps and over time, in steps of the baseline, of the systems whose cost
    was measured, each run thin and the mean thick; returns whether there are any."""
    chosen = systems(recipe)
    numbers = {name: row.value for (name, _), row in read().items()}
    # A step of another rate or warm-up costs the same.
    models = [[o for o in point.overrides if o.startswith("model")] for point in chosen]
    drawn: dict[Point, tuple[float, list[Curve]]] = {}
    for point, model in zip(chosen, models, strict=True):
        same = (numbers.get(key(recipe, each, "step"))
                for each in (point, chosen[models.index(model)]))  # fmt: skip
        took, found = next(filter(None, same), None), curves(folder, point)
        if took and found:
            drawn[point] = took, found
    if not drawn:
        return False
    with drawing(path, WIDTH, 5.5 + 0.1 * len(drawn)) as figure:
        grid = figure.subplots(2, 1)
        looks = _looks(drawn)
        for point, (took, own) in drawn.items():
            color, style = looks[point]
            means = [
                (same[0][0], statistics.mean(nll for _, nll in same))
                for same in zip(*own, strict=True)
            ]
            for axes, scale in zip(grid, (1.0, took), strict=True):
                for curve in (*own, means):
                    last = curve is means
                    axes.plot([scale * step for step, _ in curve], [nll for _, nll in curve],
                              color=color, linewidth=1.7 if last else 0.5,
                              alpha=1 if last else 0.6, linestyle=style if last else "-",
                              label=point.name if last else None)  # fmt: skip
        time = f"time, in steps of {chosen[0].name}"
        for axes, label in zip(grid, ("optimizer steps", time), strict=True):
            axes.set_xlabel(label)
            axes.set_xlim(0)
        grid[0].set_title("dev NLL, nats")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left",
                      frameon=False, fontsize=9, alignment="left")  # fmt: skip
    return True


def curves(folder: Path, point: Point) -> list[Curve]:
    """Step and dev NLL of each run of a system in a sweep's folder."""
    places = sorted((folder / point.folder).glob("seed-*"))
    return [
        [(row["step"], math.nan if row["nll"] is None else row["nll"])
         for row in read_metrics(place) if row["event"] == "valid"]
        for place in places
    ]  # fmt: skip


def _looks(drawn: Iterable[Point]) -> dict[Point, tuple[str, str]]:
    """Colour and line of each system: "DLCL, 6 layers" has the colour of "DLCL, 30 layers" and the
    line of "pre-norm, 6 layers"."""
    parts = {point: point.name.rpartition(", ") for point in drawn}
    first, second = ([*dict.fromkeys(part[end] for part in parts.values())] for end in (0, 2))
    return {point: (COLORS[first.index(part[0])], LINES[second.index(part[2])])
            for point, part in parts.items()}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    tasks = parser.add_subparsers(dest="task", required=True)
    task = tasks.add_parser("cost")
    task.add_argument("recipe")
    task.add_argument("overrides", nargs="*", metavar="key=value")
    task.add_argument("--only", action="append", default=[], metavar="NAME")
    task.add_argument("--rounds", type=int, default=30)
    task = tasks.add_parser("rows")
    task.add_argument("recipe")
    task.add_argument("folder", type=Path)
    task = tasks.add_parser("cut")
    task.add_argument("recipe")
    task.add_argument("folder", type=Path)
    task.add_argument("--only", default="DLCL, 30 layers", metavar="NAME")
    task.add_argument("--layers", type=int, nargs="+", default=[7, 0])
    args = parser.parse_args(argv)
    if args.task == "cut":
        cut(args.recipe, args.folder, args.only, args.layers)
        return 0
    if args.task == "cost":
        cost(args.recipe, args.overrides, args.only, args.rounds)
        return 0
    command = f"python -m bench.sweeps rows {args.recipe} {args.folder}"
    for name, (value, spread, unit, what) in values(args.recipe, args.folder).items():
        record(name, value, unit, what, command, "any", spread)
    picture(args.recipe, args.folder, args.folder / "time.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
