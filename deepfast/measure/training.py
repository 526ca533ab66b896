"""The training chapter: a deep DLCL model and the same model with plain residuals, trained for a
fixed number of steps, and translations by the first."""

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

from deepfast.measure.jobs import Job
from deepfast.measure.settings import RECIPE, TWIN, Settings
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import read_parallel
from deepfast.mt.models import Transformer
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search import DecodingOptions, bleu, translate_lines
from deepfast.mt.training import TrainResult, load_recipe, train
from deepfast.mt.training.environment import SIGNALS
from deepfast.mt.training.report import read_metrics

SAMPLES, BEAM = 8, 4


class Training:
    """Trains, translates and scores; the page's training chapter as plain values."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.folder = tempfile.TemporaryDirectory(prefix="deepfast-report-")
        self.chapter: dict = {"status": "interrupted", "runs": {}}
        self.result: TrainResult | None = None

    def jobs(self) -> list[Job]:
        """The run with DLCL, its translations, and the run without."""
        s = self.settings
        return [
            Job("training", f"{RECIPE}, {s.steps} steps",
                lambda: self.train("dlcl", (), s.steps)),
            Job("training", f"{s.sentences} translations", self.translate),
            Job("training", f"{RECIPE} with post-norm residuals, {s.twin_steps} steps",
                lambda: self.train("twin", TWIN, s.twin_steps)),
        ]  # fmt: skip

    def train(self, key: str, changes: Sequence[str], steps: int) -> None:
        """One run, of the recipe with these changes: its curve and its result."""
        folder = Path(self.folder.name) / key
        # As many validations as a reader can follow in a curve.
        every = max(1, self.settings.twin_steps // 3)
        recipe = load_recipe(
            RECIPE,
            [
                *self.settings.overrides, *changes, f"output={folder}", f"train.max_steps={steps}",
                "train.test_bleu=false", "train.tensorboard=false", "train.log_every=10",
                f"train.validate_every={every}", f"train.save_every={every}",
            ],
        )  # fmt: skip
        result = train(recipe, quiet=True)
        if result.stopped in SIGNALS:
            # On Ctrl-C the trainer stops cleanly. Here the whole report must stop.
            raise KeyboardInterrupt
        curve = [[r["step"], r["nll"]] for r in read_metrics(folder) if r["event"] == "valid"]
        self.chapter["runs"][key] = {
            "recipe": " ".join([RECIPE, *changes]),
            "steps": result.step,
            "seconds": result.seconds,
            "best_nll": result.best_nll,
            "learning_rate": recipe.optim.lr,
            "curve": {"dev": curve},
            "parameters": sum(p.numel() for p in _load(result.for_translation)[0].parameters()),
            "model": recipe.to_dict()["model"],
        }
        if key == "dlcl":
            self.result = result

    def translate(self) -> None:
        """What the page shows of the trained model: weights, and translations of unseen text."""
        model, vocabulary = _load(self.result.for_translation)
        folder = self.result.output / "phrases"
        with torch.no_grad():
            weights = model.encoder.connection.depth.effective_weight().tolist()
        pairs = read_parallel(folder / "test.source", folder / "test.target")
        sources, references = zip(*pairs[: self.settings.sentences], strict=True)
        options = DecodingOptions(beam=BEAM)
        hypotheses = translate_lines(model, vocabulary, list(sources), options)
        triples = list(zip(sources, references, hypotheses, strict=True))
        names = ("source", "reference", "hypothesis")
        self.chapter |= {
            "status": "measured",
            "unigram_nll": _token_frequencies_nll(folder, vocabulary),
            "weights": weights,
            "scores": asdict(bleu(hypotheses, references)),
            "beam": BEAM,
            "exact": sum(reference == found for _, reference, found in triples),
            "samples": [dict(zip(names, triple, strict=True)) for triple in triples[:SAMPLES]],
        }


def _load(path: Path) -> tuple[Transformer, Vocabulary]:
    model, vocabulary = load_model(path)
    return cast(Transformer, model), Vocabulary.from_bytes(vocabulary)


def _token_frequencies_nll(folder: Path, vocabulary: Vocabulary) -> float:
    """Dev NLL, nats per token, of a model that knows only the frequency of each target token."""

    def tokens(part: str) -> list[int]:
        lines = (folder / f"{part}.target").read_text("utf-8").splitlines()
        return [token for line in lines for token in (*vocabulary.encode(line), vocabulary.eos_id)]

    counts, dev = Counter(tokens("train")), tokens("dev")
    total = counts.total() + len(vocabulary)
    # Every count is one higher, so that a token missing from training is not impossible.
    nll = -sum(math.log((counts[token] + 1) / total) for token in dev)
    return nll / max(len(dev), 1)
