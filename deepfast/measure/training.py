"""The training chapter: a deep DLCL model and the same model with plain residuals, trained for a
fixed number of steps, and translations by the first."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from deepfast.measure.settings import RECIPE, TWIN, Settings
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import read_parallel
from deepfast.mt.models import Transformer
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search import DecodingOptions, translate_lines
from deepfast.mt.training import TrainResult, load_recipe, train
from deepfast.mt.training.environment import SIGNALS
from deepfast.mt.training.report import read_metrics

SAMPLES = 8


class Training:
    """Trains, translates and scores; the page's training chapter as plain values."""

    part = "training"

    def __init__(self, settings: Settings):
        self.settings = settings
        self.chapter: dict = {"status": "interrupted", "runs": {}}

    def work(self) -> Iterator[str]:
        """The run with DLCL, its translations, and the run without."""
        s = self.settings
        with tempfile.TemporaryDirectory(prefix="deepfast-report-") as folder:
            yield f"{RECIPE}, {s.steps} steps"
            result = self.train(Path(folder, "dlcl"), (), s.steps)
            yield "translations"
            self.show(result)
            yield f"{RECIPE} with post-norm residuals, {s.twin_steps} steps"
            self.train(Path(folder, "twin"), [*TWIN, "train.test_bleu=false"], s.twin_steps)

    def train(self, folder: Path, changes: Sequence[str], steps: int) -> TrainResult:
        """One run, of the recipe with these changes: its curve and its result."""
        # As many validations as a reader can follow in a curve.
        every = max(1, self.settings.twin_steps // 3)
        recipe = load_recipe(
            RECIPE,
            [
                *self.settings.overrides, *changes, f"output={folder}", f"train.max_steps={steps}",
                "train.tensorboard=false", "train.log_every=10", f"train.validate_every={every}",
                f"train.save_every={every}",
            ],
        )  # fmt: skip
        result = train(recipe, quiet=True)
        if result.stopped in SIGNALS:
            # On Ctrl-C the trainer stops cleanly. Here the whole report must stop.
            raise KeyboardInterrupt
        self.chapter["runs"][folder.name] = {
            "recipe": " ".join([RECIPE, *changes]),
            "steps": result.step,
            "seconds": result.seconds,
            "best_nll": result.best_nll,
            "learning_rate": recipe.optim.lr,
            "curve": [(r["step"], r["nll"]) for r in read_metrics(folder) if r["event"] == "valid"],
            "parameters": result.parameters,
            "model": recipe.to_dict()["model"],
        }
        return result

    def show(self, result: TrainResult) -> None:
        """What the page shows of the trained model: weights, and translations of unseen text."""
        model, stored = load_model(result.for_translation)
        vocabulary, folder = Vocabulary.from_bytes(stored), result.output / "phrases"
        weights = cast(Transformer, model).encoder.connection.depth.effective_weight()
        pairs = read_parallel(folder / "test.source", folder / "test.target")[:SAMPLES]
        found = translate_lines(model, vocabulary, [s for s, _ in pairs], DecodingOptions())
        self.chapter |= {
            "status": "measured",
            "weights": weights.tolist(),
            "bleu": result.test_bleu,
            "bleu_signature": result.bleu_signature,
            "samples": [
                {"source": source, "reference": reference, "hypothesis": translation}
                for (source, reference), translation in zip(pairs, found, strict=True)
            ],
        }
