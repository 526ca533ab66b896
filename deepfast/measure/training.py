"""The training chapter: a deep DLCL model and its plain twin, trained for minutes, and translated
with."""

import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import torch

from deepfast.measure.settings import Budget, Deadline, Settings
from deepfast.measure.sweep import Say
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import read_parallel
from deepfast.mt.models import Transformer
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search import DecodingOptions, bleu, translate_lines
from deepfast.mt.training import (
    Recipe,
    TrainResult,
    load_recipe,
    train,
)

# Sentences are translated in groups, so that a deadline can fall between two of them.
GROUP = 20
SAMPLES = 8


def training(settings: Settings, budget: Budget, say: Say) -> dict:
    """Trains, translates and scores; everything of the page's training chapter as plain values."""
    with tempfile.TemporaryDirectory(prefix="deepfast-report-") as folder:
        runs: dict[str, dict] = {}
        results = {}
        # Reading text comes before the trainer's own clock, averaging and validation after it.
        beside = 5.0
        for key, part, name in (("dlcl", "training", settings.recipe),
                                ("twin", "twin", settings.twin)):  # fmt: skip
            with budget.start(part) as deadline:
                seconds = max(1.0, deadline.left - min(beside, 0.5 * deadline.left))
                runs[key], results[key] = _train(name, settings, Path(folder) / key, seconds, say)
                beside = max(0.0, deadline.seconds - deadline.left - seconds)
        with budget.start("translation") as deadline:
            chapter = {"runs": runs, "status": "measured"}
            chapter |= _after(results["dlcl"], settings, deadline, say)
    return chapter


def _train(
    name: str, settings: Settings, folder: Path, seconds: float, say: Say
) -> tuple[dict, TrainResult]:
    """One run: its curve and how it ended."""
    recipe = load_recipe(
        name,
        [
            f"output={folder}", f"train.max_minutes={seconds / 60:.4f}", "train.test_bleu=false",
            "train.tensorboard=false", "train.log_every=10", "train.validate_every=50",
            "train.save_every=50", *settings.overrides,
        ],
    )  # fmt: skip
    say(f"training {name} for at most {seconds:.0f} s")
    result = train(recipe, quiet=True)
    if result.stopped in ("SIGINT", "SIGTERM"):
        # The trainer ends in good order on Ctrl-C; here it means the whole report.
        raise KeyboardInterrupt
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = {
        "train": [[r["step"], r["nll"], r["seconds"]] for r in rows if r["event"] == "train"],
        "dev": [[r["step"], r["nll"], r["seconds"]] for r in rows if r["event"] == "valid"],
    }
    say(
        f"training {name}: {result.step} steps in {result.seconds:.0f} s, dev NLL "
        + (f"{curve['dev'][-1][1]:.3f}" if curve["dev"] else "not measured")
    )
    return _summary(name, recipe, result) | {"curve": curve}, result


def _summary(name: str, recipe: Recipe, result: TrainResult) -> dict:
    model, vocabulary = _load(result.for_translation)
    config = model.config
    return {
        "recipe": name,
        "steps": result.step,
        "recipe_steps": recipe.train.max_steps,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "best_nll": result.best_nll,
        "average_nll": result.average_nll,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(vocabulary),
        "learning_rate": recipe.optim.lr,
        "max_tokens": recipe.data.max_tokens,
        "model": {
            "encoder_layers": config.encoder_layers,
            "decoder_layers": config.decoder_layers,
            "connection": config.encoder_connection,
            "norm": config.norm,
            "dim": config.dim,
            "heads": config.heads,
            "ffn_dim": config.ffn_dim,
            "dropout": config.dropout,
        },
    }


def _after(result: TrainResult, settings: Settings, deadline: Deadline, say: Say) -> dict:
    """What the trained model is shown to do: its weights, and translations of unseen text."""
    model, vocabulary = _load(result.for_translation)
    folder = result.output / "phrases"
    chapter: dict = {
        "checkpoint": result.for_translation.name,
        "unigram_nll": _token_frequencies_nll(folder, vocabulary),
        "weights": None,
    }
    dlcl = model.encoder.connection.dlcl
    if dlcl is not None and dlcl.kind == "scalar":
        with torch.no_grad():
            chapter["weights"] = dlcl.effective_weight().tolist()
    pairs = read_parallel(folder / "test.en", folder / "test.de").pairs
    sources, references = zip(*pairs[: settings.sentences], strict=True)
    hypotheses: list[str] = []
    while len(hypotheses) < len(sources) and (not hypotheses or deadline.left > 0):
        group = list(sources[len(hypotheses) : len(hypotheses) + GROUP])
        hypotheses += translate_lines(model, vocabulary, group, DecodingOptions(beam=settings.beam))
    scores = bleu(hypotheses, list(references[: len(hypotheses)]))
    say(f"BLEU {scores.bleu:.2f} on {len(hypotheses)} of {len(sources)} test phrases")
    shown = list(zip(sources, references, hypotheses, strict=False))[:SAMPLES]
    names = ("source", "reference", "hypothesis")
    return chapter | {
        "scores": scores.as_dict(),
        "beam": settings.beam,
        "asked_sentences": len(sources),
        "exact": sum(r == h for r, h in zip(references, hypotheses, strict=False)),
        "samples": [dict(zip(names, sample, strict=True)) for sample in shown],
    }


def _load(path: Path) -> tuple[Transformer, Vocabulary]:
    model, vocabulary = load_model(path)
    return model, Vocabulary.from_bytes(vocabulary)


def _token_frequencies_nll(folder: Path, vocabulary: Vocabulary) -> float:
    """Dev NLL, nats per token, of knowing only how frequent each target token is in training."""
    counts: Counter[int] = Counter()
    for line in (folder / "train.de").read_text("utf-8").splitlines():
        counts.update([*vocabulary.encode(line), vocabulary.eos_id])
    total = sum(counts.values()) + len(vocabulary)
    nll = tokens = 0
    for line in (folder / "dev.de").read_text("utf-8").splitlines():
        for token in [*vocabulary.encode(line), vocabulary.eos_id]:
            # One more of every token: a token that training lacks is not impossible.
            nll -= math.log((counts[token] + 1) / total)
            tokens += 1
    return nll / max(tokens, 1)
