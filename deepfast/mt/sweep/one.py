"""One run in its own process, so that the peak memory is that of this run.

python -m deepfast.mt.sweep.one FOLDER

The folder holds the recipe (`runs.Run.write`). The result is written beside it.
"""

import math
import signal
import statistics
import sys
import tempfile
import traceback
from itertools import pairwise
from pathlib import Path

import torch

from deepfast.machine import environment
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search.score import sentence_counts
from deepfast.mt.sweep.runs import INTERRUPTED, read_recipe, write_result
from deepfast.mt.training import NotFiniteError, Recipe, TrainResult, train
from deepfast.mt.training.corpus import held_out, load_corpus
from deepfast.mt.training.environment import SIGNALS, peak_bytes, resolve_device, settings
from deepfast.mt.training.memory import set_policy
from deepfast.mt.training.optim import PREFIX
from deepfast.mt.training.report import read_metrics
from deepfast.mt.training.run import TRANSLATED
from deepfast.mt.training.sections import DataSection
from deepfast.mt.training.trainer import Trainer

MACHINE = "date", "cpu", "system", "torch", "deepfast", "commit"
"""What a result says of where it was made."""


def before(recipe: Recipe) -> dict:
    """What is known before the first step: the model and the peak memory of a step."""
    device = resolve_device(recipe.train.device)
    with tempfile.TemporaryDirectory() as folder, settings(recipe.train):
        corpus = load_corpus(recipe.data, seed=recipe.train.seed, folder=Path(folder))
        trainer = Trainer(recipe, corpus, device)
        found = {
            "model": trainer.model.describe(),
            "live_bytes": None,
            "threads": torch.get_num_threads(),
        }
        planned = recipe.saves_memory and recipe.planned()
        if recipe.saves_memory and not planned:
            set_policy(trainer.model, recipe.recompute)
        # A planned run measures its own step, under the policies of its plan.
        peak = math.inf if planned else trainer.measure()
        if peak < math.inf:
            found["live_bytes"] = int(peak)
    return found


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def after(result: TrainResult, data: DataSection) -> dict:
    """What the run produced: curves, gradient norms, and the model that translates."""
    # A run in stages has a folder for each stage.
    stages = sorted(result.output.parent.glob("stage*")) or [result.output]
    curve, steps, seconds = [], 0, 0.0
    found: dict = {}
    for stage in stages:
        rows = read_metrics(stage)
        curve += [[steps + r["step"], r["nll"]] for r in rows if r["event"] == "valid"]
        trained = [row for row in rows if row["event"] == "train"]
        steps, seconds = steps + trained[-1]["step"], seconds + rows[-1]["seconds"]
        measured = [row["measured_bytes"] for row in rows if row["event"] == "memory"]
        found |= {"live_bytes": measured[-1]} if measured else {}
    model, _ = load_model(result.for_translation)
    first, last = trained[0], trained[-1]
    # The median: a run may have been paused.
    took = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(trained)]
    if took:
        found["step_seconds"] = statistics.median(took)
    return found | {
        "model": model.describe(),
        "steps": steps,
        "seconds": seconds,
        "bleu": result.test_bleu,
        # The BLEU of several languages is a mean, which no sums of sentences give.
        "sentences": None
        if result.test_bleu is None or data.tagged
        else sentence_counts(
            (result.output / TRANSLATED).read_text("utf-8").splitlines(),
            [target for _, target in held_out(data)[1]],
        ),
        "curve": curve,
        "nll": min(
            (x for x in (result.best_nll, result.average_nll) if x is not None), default=None
        ),
        # The rest is of the last stage.
        "gradient_norms": [
            {"step": row["step"]} | {k: row[k] for k in row if k.startswith(PREFIX)}
            for row in (first, last)
        ],
        # Other work on the machine disturbed the fastest line least.
        "target_tokens_per_second": max(row["target_tokens_per_second"] for row in trained),
        "parameters": parameters(model),
    }


def main(folder: Path) -> int:
    recipe = read_recipe(folder)
    machine = environment()
    found = {"seed": recipe.train.seed} | {key: machine[key] for key in MACHINE} | before(recipe)
    try:
        result = train(recipe)
    except NotFiniteError as error:
        found["diverged"] = str(error)
    else:
        if result.stopped in SIGNALS:
            return INTERRUPTED
        found |= after(result, recipe.data)
    found["process_bytes"] = peak_bytes(resolve_device(recipe.train.device))
    write_result(folder, found)
    return 0


if __name__ == "__main__":
    # Outside of the training loop, which saves first, SIGTERM ends the process as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(Path(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        # The process that reads the log shows its last line.
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
