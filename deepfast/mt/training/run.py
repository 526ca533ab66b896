"""A training run, from the recipe to the averaged checkpoint.

`train` is the entry. `_Run` decides when to log, validate, save and stop; the training step itself
is `Trainer.train_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepfast.files import write_atomically
from deepfast.memory.units import format_bytes
from deepfast.mt.data import subwords
from deepfast.mt.data.text import write_lines
from deepfast.mt.models import TranslationModel
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training.corpus import Corpus, by_language, load_corpus
from deepfast.mt.training.environment import (
    SIGNALS,
    StopSignal,
    give_back_large_blocks,
    peak_bytes,
    release_freed_memory,
    resolve_device,
    settings,
)
from deepfast.mt.training.errors import (
    CheckpointError,
    NotFiniteError,
    OtherRankError,
    RecipeError,
    TrainingError,
)
from deepfast.mt.training.failed_step import check_weights
from deepfast.mt.training.growing import read_bottom, runs, stage
from deepfast.mt.training.memory import fit_memory, set_policy
from deepfast.mt.training.parallel import is_sharded
from deepfast.mt.training.ranks import Ranks, restarts, run_ranks
from deepfast.mt.training.recipe import Recipe
from deepfast.mt.training.recipe_file import check_kept, differences, dump_recipe
from deepfast.mt.training.report import Report, TrainResult
from deepfast.mt.training.run_folder import (
    BEST,
    checkpoint_to_resume,
    intact_instead,
    new_folder,
    only_run,
    step_checkpoints,
)
from deepfast.mt.training.saving import Saving, read_start
from deepfast.mt.training.trainer import Trainer

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
    with (
        run_ranks(resolve_device(recipe.train.device), recipe.parallel.timeout) as ranks,
        only_run(Path(recipe.output)) if ranks.first else nullcontext(),
    ):
        _check_same(recipe, ranks)
        recipe = ranks.by_first(lambda: _continued(recipe))
        parts = ranks.by_first(lambda: runs(recipe))
        for part in parts:
            # Checked for the second run too, before the first begins.
            resolve_device(part.train.device)
        for part in parts:
            with settings(part.train):
                try:
                    run = _Run(part, quiet, stage(recipe, part), ranks)
                except CheckpointError as error:
                    more = intact_instead(Path(part.output)) if part.resume is True else ""
                    raise CheckpointError(f"{error}{more}") from error
                result = run.go()
                # DDP goes before its process group. Freed last, it would close the group while it
                # holds Python's lock, for which a thread of the group may wait: torch 2.13 then
                # hangs.
                del run
            if result.stopped in SIGNALS:
                break
        return result


def _check_same(recipe: Recipe, ranks: Ranks) -> None:
    """Refuses ranks with different recipes; the one with another recipe than the first says so.

    Raises:
        RecipeError: this rank's recipe is another one.
        OtherRankError: that of another rank is.
    """
    first, *others = ranks.objects(recipe.to_dict())
    for rank, other in enumerate(others, 1):
        if changes := differences(first, other):
            text = f"expected the recipe of rank 0, got another one ({', '.join(changes[:3])})"
            raise (
                RecipeError(text) if rank == ranks.rank else OtherRankError(f"rank {rank}: {text}")
            )


def _continued(recipe: Recipe) -> Recipe:
    """The recipe that resumes, where torchrun has started the ranks again."""
    path = isinstance(recipe.resume, str) and not step_checkpoints(recipe.output)
    return recipe if not restarts() or path else replace(recipe, resume=True)


class _Run:
    """One run: when to log, validate, save and stop."""

    def __init__(self, recipe: Recipe, quiet: bool, stage: str | None, ranks: Ranks):
        self.recipe, self.section, self.stage = recipe, recipe.train, stage
        self.folder, self.ranks = Path(recipe.output), ranks
        device = resolve_device(recipe.train.device)
        self.saved: Path | None = ranks.by_first(
            lambda: checkpoint_to_resume(recipe.output, recipe.resume)
        )
        content = read_start(self.saved, ranks) if self.saved else None
        if content is not None:
            check_kept(recipe, content["recipe"], content["step"], self.saved)
        # A checkpoint of this run already holds the bottom.
        bottom = None if content else read_bottom(recipe)
        self.grows_on: str | None = None
        """The checkpoint that a new run grows on, in words."""
        with new_folder(self.folder) if ranks.first else nullcontext():
            corpus = self._corpus(content or bottom)
            self.trainer = Trainer(recipe, corpus, device, ranks, bottom)
            if bottom is not None:
                self.grows_on = f"{recipe.grow['from']}, of step {bottom['step']}"
        self.saving = Saving(self.folder, self.trainer, self.section)
        self.signalled: int | None = None
        """The rank that got the signal."""
        self.measured: int | None = None
        """Peak bytes of the trial step."""
        self.changed: list[str] = []
        if content is not None:
            more = self.saving.restore(content, self.saved)
            before = content["recipe"] | {"resume": recipe.resume}
            self.changed = differences(before, recipe.to_dict()) + more
        # Not before it was read: it may be damaged.
        ranks.saved = self.saved
        self.report = Report(
            self.folder,
            total_steps=self.section.max_steps,
            first_step=self.trainer.step,
            tensorboard=self.section.tensorboard,
            quiet=quiet,
            ranks=ranks,
        )
        self.began = time.perf_counter() - self.trainer.seconds

    def _corpus(self, start: dict[str, Any] | None) -> Corpus:
        """The text; the first rank learns the vocabulary for all."""
        given = subwords(start["vocabulary"]) if start else None
        seed, data = self.section.seed, self.recipe.data
        first: list[Corpus] = []

        def learn() -> bytes:
            first.append(load_corpus(data, seed=seed, folder=self.folder, vocabulary=given))
            return first[0].vocabulary.to_bytes()

        learned = self.ranks.by_first(learn)
        if first:
            return first[0]
        return load_corpus(data, seed=seed, folder=None, vocabulary=subwords(learned))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def go(self) -> TrainResult:
        try:
            self._introduce()
            self._fit_memory()
            with nullcontext(self.ranks.signal) if self.ranks.signal else StopSignal() as signal:
                stopped = self._loop(signal)
                if stopped not in SIGNALS:
                    self._complete()
                if not self.saving.has_step():
                    self._save()
            if stopped in SIGNALS:
                on = "" if self.signalled is None else f" on rank {self.signalled}"
                self.report.say(
                    f"{stopped}{on}: stopped after step {self.trainer.step}; continue from "
                    f"{self.saved} with resume=true"
                )
                return self._result(stopped)
            peak = f"peak memory {format_bytes(peak_bytes(self.trainer.device))}"
            if self.measured is not None:
                peak = f"peak of live tensors {format_bytes(self.measured)}, process {peak}"
            self.report.say(f"stopped by {stopped} after {self.seconds:.0f} s, {peak}")
            return self._finish(stopped)
        except BaseException as error:
            # What stopped the run, such as a full disk, may stop its log too.
            with suppress(TrainingError):
                self.report.note(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.report.close()

    def _introduce(self) -> None:
        trainer, say = self.trainer, self.report.say
        if self.ranks.first:
            write_atomically(self.folder / "recipe.yaml", dump_recipe(self.recipe).encode("utf-8"))
            trainer.corpus.vocabulary.save(self.folder / "vocabulary.model")
        for line in (*([self.stage] if self.stage else []), *trainer.corpus.summary):
            say(line)
        total, trainable = (
            sum(p.numel() for p in group)
            for group in (trainer.model.parameters(), trainer.parameters)
        )
        count = f"{total:,} parameters"
        if trainable < total:
            count += f", {trainable:,} of them trainable"
        say(
            f"model {trainer.model.describe()}, {count}, {trainer.device}, "
            f"{self.section.precision}, {torch.get_num_threads()} threads"
        )
        if not self.ranks.alone:
            kind = "fsdp" if is_sharded(trainer.loss) else "ddp"
            say(f"{self.ranks.size} ranks, {kind}")
        if self.grows_on is not None:
            say(f"grows on {self.grows_on}")
        if trainer.step:
            say(f"resumed from {self.saved} at step {trainer.step}")
            for line in self.changed:
                say(f"      changed since: {line}")
        elif self.recipe.resume is True:
            say(f"nothing to resume in {self.recipe.output}: from the first step")

    def _fit_memory(self) -> None:
        if not self.recipe.saves_memory:
            return
        if not self.recipe.planned():
            # A policy given by name, without a prediction.
            set_policy(self.trainer.model, self.recipe.recompute)
            return
        if self.trainer.device.type == "cpu":
            give_back_large_blocks()
        row = fit_memory(self.trainer, self.report.say)
        self.measured = row["measured_bytes"]
        self.report.log("memory", row, seconds=self.seconds)

    def _loop(self, signal: StopSignal) -> str:
        """Trains until a limit or a signal stops it, and returns which."""
        trainer, section = self.trainer, self.section
        while (stopped := self._stopped(signal)) is None:
            self._finite(trainer.train_step)
            if self.recipe.saves_memory and trainer.device.type == "cpu":
                release_freed_memory()
            # The first step tells how gradients are at the start.
            if trainer.step == 1 or trainer.step % section.log_every == 0:
                self.report.log("train", trainer.take_metrics(), seconds=self.seconds)
            if trainer.step % section.validate_every == 0:
                self._validate()
            if trainer.step % section.save_every == 0:
                self._save()
        return stopped

    def _finite(self, work: Callable[[], None]) -> None:
        """Does the work; where it meets a value that is not finite, names the last checkpoint."""
        try:
            work()
        except NotFiniteError as error:
            if not self.ranks.alone:
                raise
            raise NotFiniteError(f"{error}; last checkpoint: {self.saved or 'none'}") from error

    def _stopped(self, signal: StopSignal) -> str | None:
        """Why to stop now, the same on all ranks: a signal to any of them, or a limit."""
        if self.ranks.alone:
            return signal.name or self._due(self.seconds)
        names = list(SIGNALS)
        mine = names.index(signal.name) if signal.name else -1
        rows = self.ranks.rows(mine, self.seconds)
        for rank, (number, _) in enumerate(rows):
            if number >= 0:
                self.signalled = rank
                return names[int(number)]
        return self._due(rows[0][1])

    def _complete(self) -> None:
        """Logs and validates the steps since the last line of metrics, then saves."""
        trainer = self.trainer
        validate = bool(trainer.corpus.dev_batches) and trainer.validated_at != trainer.step
        if trainer.window.steps:
            self.report.log("train", trainer.take_metrics(), seconds=self.seconds)
        elif not validate:
            return
        if validate:
            self._validate()
        self._save()

    def _due(self, seconds: float) -> str | None:
        section, trainer = self.section, self.trainer
        if section.max_steps is not None and trainer.step >= section.max_steps:
            return "max_steps"
        if section.max_minutes is not None and seconds >= 60 * section.max_minutes:
            return "max_minutes"
        if section.patience is not None and trainer.since_best >= section.patience:
            return "patience"
        return None

    def _validate(self) -> None:
        trainer = self.trainer
        if not trainer.corpus.dev_batches:
            return
        self._finite(lambda: check_weights(trainer))
        found = trainer.validate()
        best = trainer.record(found.nll)
        row: dict[str, Any] = {"step": trainer.step} | found.row
        if self.section.validate_bleu:
            row |= self._bleu(trainer.whole_model(), trainer.corpus.dev)[0]
        self.report.log("valid", row | {"best": best}, seconds=self.seconds)
        if best:
            trainer.seconds = self.seconds
            self.saving.best()

    def _save(self) -> None:
        self.report.sync()
        self._finite(lambda: check_weights(self.trainer))
        self.trainer.seconds = self.seconds
        self.saved = self.ranks.saved = self.saving.step()

    def _bleu(
        self, model: TranslationModel, pairs: list[tuple[str, str]]
    ) -> tuple[dict[str, float], list[str]]:
        """BLEU, 0 to 100; with several languages also that of each, and the first is their mean.
        With the translations."""
        # Imported here, because training without BLEU needs no search.
        from deepfast.mt.search import bleu, translate_lines

        corpus = self.trainer.corpus
        lines, references = zip(*pairs, strict=True)
        model.eval()
        rank, size = self.ranks.rank, self.ranks.size
        mine = lines[rank::size]
        translated = translate_lines(model, corpus.vocabulary, mine) if mine else []
        outputs = [""] * len(lines)
        for other, part in enumerate(self.ranks.objects(translated)):
            outputs[other::size] = part
        if not corpus.languages:
            return {"bleu": bleu(outputs, references).bleu}, outputs
        each = {
            f"bleu_{name}": bleu([outputs[i] for i in own], [references[i] for i in own]).bleu
            for name, own in by_language(pairs).items()
        }
        return {"bleu": sum(each.values()) / len(each)} | each, outputs

    def _finish(self, stopped: str) -> TrainResult:
        """Averages checkpoints; translates the test part with the better of average and best, into
        the file `TRANSLATED`."""
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
            scores, lines = self._bleu(model, corpus.test)
            if self.ranks.first:
                write_lines(self.folder / TRANSLATED, lines)
            result.test_bleu = scores["bleu"]
            self.report.log("test", step | scores | {"of": path.name}, seconds=self.seconds)
        return result

    def _result(self, stopped: str) -> TrainResult:
        best = self.trainer.best_step > 0
        return TrainResult(
            output=self.folder,
            step=self.trainer.step,
            stopped=stopped,
            seconds=self.seconds,
            checkpoint=self.saved,
            best=self.folder / BEST if best else None,
            best_nll=self.trainer.best_nll if best else None,
        )
