"""A training run, from the recipe to the averaged checkpoint.

`train` is the entry. `_Run` decides when to log, validate, save and stop; the training step itself
is `Trainer.train_step`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepfast.files import make_folder, write_atomically
from deepfast.memory.units import format_bytes
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import write_lines
from deepfast.mt.models import TranslationModel
from deepfast.mt.models.checkpoint import load_checkpoint, load_model, read_run
from deepfast.mt.training import norms_table
from deepfast.mt.training.corpus import Corpus, load_corpus
from deepfast.mt.training.environment import (
    SIGNALS,
    StopSignal,
    peak_bytes,
    release_freed_memory,
    resolve_device,
    settings,
)
from deepfast.mt.training.errors import NotFiniteError
from deepfast.mt.training.failed_step import check_weights
from deepfast.mt.training.growing import runs
from deepfast.mt.training.memory import fit_memory, set_policy
from deepfast.mt.training.parallel import is_sharded
from deepfast.mt.training.ranks import Ranks, run_ranks
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.recipe_file import check_kept, differences, dump_recipe
from deepfast.mt.training.report import RESULT, Report, TrainResult, read_metrics, write_result
from deepfast.mt.training.run_folder import BEST, checkpoint_to_resume, only_run
from deepfast.mt.training.saving import Saving
from deepfast.mt.training.trainer import Trainer

if TYPE_CHECKING:
    from deepfast.mt.training.bleu import Translated

TRANSLATED = "test.txt"
"""The translations of the test part, a line for each sentence."""


def train(recipe: Recipe, *, quiet: bool = False) -> TrainResult:
    """Trains a translation model as the recipe says; Ctrl-C leaves a checkpoint to resume from.

    A recipe with a section `grow` is two runs; the result is that of the last one.

    Seeds torch's and Python's random generators. Threads and determinism are restored at the end.

    Args:
        quiet: print nothing; the metrics are still written to the output folder.

    Raises:
        ValueError: the recipe, the text or a checkpoint cannot be used.
        RuntimeError: the loss is not finite, or the folder cannot be written.
    """
    recipe.data.check_text()
    if recipe.train.validate_bleu or recipe.train.test_bleu:
        from deepfast.mt.search.score import require_tokenizer, tokenizer_of

        require_tokenizer(tokenizer_of(recipe.data.target_language))
    with (
        run_ranks(resolve_device(recipe.train.device), recipe.parallel.timeout) as ranks,
        only_run(Path(recipe.output)) if ranks.first else nullcontext(),
    ):
        # All ranks train the recipe of the first one.
        parts = ranks.by_first(lambda: runs(recipe))
        for part in parts:
            # Checked for the second run too, before the first begins.
            resolve_device(part.train.device)
        folder = Path(recipe.output)
        try:
            for part in parts:
                result = _one_run(part, quiet, ranks, folder / RESULT)
                if result.stopped in SIGNALS:
                    return result
        except NotFiniteError as error:
            if ranks.first:
                write_result(folder, {"diverged": str(error)})
            raise
        if ranks.first:
            write_result(folder, result.summary())
        return result


def _one_run(recipe: Recipe, quiet: bool, ranks: Ranks, ended: Path) -> TrainResult:
    """One run from its first step, or the step that it resumes from, to its last. At its return DDP
    is freed, before its process group: the other way round torch 2.13 hangs."""
    with settings(recipe.train):
        run = _Run(recipe, quiet, ranks)
        if ranks.first:
            # That of an earlier end. A run that is refused leaves it.
            ended.unlink(missing_ok=True)
        return run.go()


class _Run:
    """One run: when to log, validate, save and stop."""

    def __init__(self, recipe: Recipe, quiet: bool, ranks: Ranks):
        self.recipe, self.section = recipe, recipe.train
        self.folder, self.ranks = Path(recipe.output), ranks
        device = resolve_device(recipe.train.device)
        self.start: list[str] = []
        """From where the run starts, in words."""
        saved = ranks.by_first(lambda: checkpoint_to_resume(recipe.output, recipe.resume))
        content = read_run(saved) if saved else None
        if content is not None:
            changed = differences(content["recipe"] | {"resume": recipe.resume}, recipe.to_dict())
            check_kept(changed, saved)
        # A checkpoint of this run already holds the bottom.
        grows = recipe.grow is not None and content is None
        bottom = load_checkpoint(recipe.grow["from"]) if grows else None
        if ranks.first:
            make_folder(self.folder)
        corpus = self._corpus(content or bottom)
        self.trainer = Trainer(recipe, corpus, device, ranks, bottom)
        self.saving = Saving(self.folder, self.trainer, self.section)
        if bottom is not None:
            self.start.append(f"grows on {recipe.grow['from']}, of step {bottom['step']}")
        if content is not None:
            changed += self.saving.restore(content, saved)
            self.start.append(f"resumed from {saved} at step {self.trainer.step}")
            self.start += [f"      changed since: {line}" for line in changed]
        elif recipe.resume:
            self.start.append(f"nothing to resume in {recipe.output}: from the first step")
        # Not before it was read: it may be damaged.
        ranks.saved = saved
        self.report = Report(
            self.folder if ranks.first else None,
            total_steps=self.section.max_steps,
            first_step=self.trainer.step,
            tensorboard=self.section.tensorboard,
            quiet=quiet or not ranks.first,
        )
        self.began = time.perf_counter() - self.trainer.seconds

    def _corpus(self, start: dict[str, Any] | None) -> Corpus:
        """The text; the first rank learns the vocabulary for all."""
        given = Vocabulary.from_bytes(start["vocabulary"]) if start else None
        load = partial(load_corpus, self.recipe.data, seed=self.section.seed, folder=self.folder)
        first: list[Corpus] = []

        def learn() -> bytes:
            first.append(load(vocabulary=given))
            return first[0].vocabulary.to_bytes()

        learned = Vocabulary.from_bytes(self.ranks.by_first(learn))
        return first[0] if first else load(vocabulary=learned, generate=False)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def go(self) -> TrainResult:
        try:
            self._introduce()
            self._fit_memory()
            with nullcontext(self.ranks.signal) if self.ranks.signal else StopSignal() as signal:
                stopped = self._loop(signal)
            if stopped in SIGNALS:
                self.report.say(
                    f"{stopped}: stopped after step {self.trainer.step}; continue from "
                    f"{self.ranks.saved} with resume=true"
                )
                return self._result(stopped)
            peak = format_bytes(peak_bytes(self.trainer.device))
            self.report.say(f"stopped by {stopped} after {self.seconds:.0f} s, peak memory {peak}")
            return self._finish(stopped)
        finally:
            self.report.close()

    def _introduce(self) -> None:
        trainer = self.trainer
        if self.ranks.first:
            write_atomically(self.folder / "recipe.yaml", dump_recipe(self.recipe).encode("utf-8"))
            trainer.corpus.vocabulary.save(self.folder / "vocabulary.model")
        total, trainable = (
            sum(p.numel() for p in group)
            for group in (trainer.model.parameters(), trainer.parameters)
        )
        frozen = f", {trainable:,} of them trainable" if trainable < total else ""
        kind = "fsdp" if is_sharded(trainer.loss) else "ddp"
        ranks = [] if self.ranks.alone else [f"{self.ranks.size} ranks, {kind}"]
        model = (
            f"model {trainer.model.describe()}, {total:,} parameters{frozen}, {trainer.device}, "
            f"{self.section.precision}, {torch.get_num_threads()} threads"
        )
        head = f"output {self.folder}"
        for line in (head, *trainer.corpus.summary, model, *ranks, *self.start):
            self.report.say(line)

    def _fit_memory(self) -> None:
        if self.recipe.recompute is not None:
            set_policy(self.trainer.model, self.recipe.recompute)
        elif self.recipe.memory_budget is not None:
            row = fit_memory(self.trainer, self.report.say)
            self.report.log("memory", row, seconds=self.seconds)

    def _loop(self, signal: StopSignal) -> str:
        """Trains until a limit or a signal stops it, and returns which."""
        trainer, section = self.trainer, self.section
        first = trainer.step
        while True:
            stopped = self._stopped(signal)
            if stopped and stopped not in SIGNALS:
                self._complete()
            if stopped or (trainer.step > first and trainer.step % section.save_every == 0):
                self._save()
            if stopped:
                # A signal may have come in the meantime.
                return self._stopped(signal) or stopped
            trainer.train_step()
            if self.recipe.saves_memory and trainer.device.type == "cpu":
                release_freed_memory()
            # The first step tells how gradients are at the start.
            if trainer.step == 1 or trainer.step % section.log_every == 0:
                self.report.log("train", trainer.take_metrics(), seconds=self.seconds)
            if trainer.step % section.validate_every == 0:
                self._validate()

    def _stopped(self, signal: StopSignal) -> str | None:
        """Why to stop now, the same on all ranks: a signal to any of them, or a limit."""
        names = list(SIGNALS)
        rows = self.ranks.rows(names.index(signal.name) if signal.name else -1, self.seconds)
        number, _ = max(rows)
        if number >= 0:
            return names[int(number)]
        trainer, section = self.trainer, self.section
        limits = {
            "max_steps": (trainer.step, section.max_steps),
            "max_minutes": (rows[0][1] / 60, section.max_minutes),
            "patience": (trainer.since_best, section.patience),
        }
        for name, (reached, most) in limits.items():
            if most is not None and reached >= most:
                return name
        return None

    def _complete(self) -> None:
        """Logs and validates the steps since the last line of metrics."""
        if self.trainer.window.steps:
            self.report.log("train", self.trainer.take_metrics(), seconds=self.seconds)
        if self.trainer.validated_at != self.trainer.step:
            self._validate()

    def _validate(self) -> None:
        trainer = self.trainer
        if not trainer.corpus.dev_batches:
            return
        check_weights(trainer)
        found = trainer.validate()
        best = trainer.record(found.nll)
        row: dict[str, Any] = {"step": trainer.step} | found.row
        if self.section.validate_bleu:
            row |= self._translated(trainer.whole_model(), trainer.corpus.dev).row
        self.report.log("valid", row | {"best": best}, seconds=self.seconds)
        if best:
            trainer.seconds = self.seconds
            self.saving.best()

    def _save(self) -> None:
        check_weights(self.trainer)
        self.trainer.seconds = self.seconds
        self.ranks.saved = self.saving.step()

    def _translated(self, model: TranslationModel, pairs: list[tuple[str, str]]) -> Translated:
        # Imported here, because training without BLEU needs no search.
        from deepfast.mt.training.bleu import translated

        return translated(model, pairs, self.recipe, self.trainer.corpus, self.ranks)

    def _finish(self, stopped: str) -> TrainResult:
        """Averages checkpoints; translates the test part with the better of average and best, into
        the file `TRANSLATED`; prints the norms of the layers' gradients."""
        result, trainer, corpus = self._result(stopped), self.trainer, self.trainer.corpus
        step = {"step": trainer.step}
        if self.section.average_last:
            result.average, count = self.saving.average()
            row: dict[str, Any] = {"of": f"{count} checkpoint{'s' if count > 1 else ''}"}
            if corpus.dev_batches:
                found = trainer.validate()
                result.average_nll = found.nll
                row |= found.row
            self.report.log("average", step | row, seconds=self.seconds)
        if self.section.test_bleu:
            path = result.for_translation
            model, _ = load_model(path, trainer.device)
            test = self._translated(model, corpus.test)
            if self.ranks.first:
                write_lines(self.folder / TRANSLATED, test.lines)
            result.test_bleu = test.row["bleu"]
            result.bleu_signature, result.sentences = test.signature, test.sentences
            self.report.log("test", step | test.row | {"of": path.name}, seconds=self.seconds)
        if self.ranks.first:
            for line in norms_table.lines(read_metrics(self.folder)):
                self.report.say(line)
        result.peak_bytes = peak_bytes(trainer.device)
        return result

    def _result(self, stopped: str) -> TrainResult:
        best = self.trainer.best_step > 0
        return TrainResult(
            output=self.folder,
            step=self.trainer.step,
            stopped=stopped,
            seconds=self.seconds,
            parameters=sum(p.numel() for p in self.trainer.model.parameters()),
            checkpoint=self.ranks.saved,
            best=self.folder / BEST if best else None,
            best_nll=self.trainer.best_nll if best else None,
        )
