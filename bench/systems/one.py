"""One run of one row, in its own process, so that the peak memory is that of this run.

python -m bench.systems.one RECIPE FOLDER SEED key=value ...
"""

import argparse
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch

from deepfast.mt.data.text import write_atomically
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import NotFiniteError, load_recipe, train
from deepfast.mt.training.corpus import load_corpus
from deepfast.mt.training.environment import peak_bytes, resolve_device, settings
from deepfast.mt.training.trainer import Trainer

RESULT = "result.json"


def before(recipe) -> dict:
    """What is known before the first step: the peak memory of a step, and the tokens of the run."""
    device = resolve_device(recipe.train.device)
    with tempfile.TemporaryDirectory() as folder, settings(recipe.train):
        corpus = load_corpus(recipe.data, seed=recipe.train.seed, folder=Path(folder))
        trainer = Trainer(recipe, corpus, device)
        found = {"live_bytes": int(trainer.measure()), "model": trainer.model.describe()}
        steps, tokens = recipe.train.max_steps, 0
        if recipe.grow is not None:
            steps += recipe.grow["train"]["max_steps"]
        steps *= recipe.optim.accumulate
        while steps > 0:
            seen = [batch.target_tokens for batch in islice(corpus.batches, steps)]
            tokens, steps = tokens + sum(seen), steps - len(seen)
    return found | {"target_tokens": tokens}


def after(result) -> dict:
    """What the run produced: curves, and the model that translates."""
    # A run in stages has a folder for each stage.
    stages = sorted(result.output.parent.glob("stage*")) or [result.output]
    curve, steps, seconds = [], 0, 0.0
    for stage in stages:
        rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
        curve += [[steps + r["step"], r["nll"]] for r in rows if r["event"] == "valid"]
        trained = [row["target_tokens_per_second"] for row in rows if row["event"] == "train"]
        steps, seconds = curve[-1][0], seconds + rows[-1]["seconds"]
    model, _ = load_model(result.for_translation)
    return {
        "model": model.describe(),
        "steps": steps,
        "seconds": seconds,
        "bleu": result.test_bleu,
        "curve": curve,
        "nll": min(x for x in (result.best_nll, result.average_nll) if x is not None),
        # Of the last stage. Other work on the machine disturbed the fastest line least.
        "target_tokens_per_second": max(trained),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    recipe = load_recipe(
        args.recipe,
        [*args.overrides, f"train.seed={args.seed}", f"output={args.folder / 'run'}",
         "resume=true"],
    )  # fmt: skip
    found = {"seed": args.seed, "overrides": args.overrides} | before(recipe)
    try:
        result = train(recipe)
    except NotFiniteError as error:
        found["diverged"] = str(error)
    else:
        if result.stopped in ("SIGINT", "SIGTERM"):
            return 130
        found |= after(result)
    found["process_bytes"] = peak_bytes(resolve_device(recipe.train.device))
    found["threads"] = torch.get_num_threads()
    write_atomically(args.folder / RESULT, json.dumps(found, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
