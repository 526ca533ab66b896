"""What a run saves: a step to resume from, the best and the average to translate with.

All ranks write a step together, as a folder; a process alone is one rank of one. The first rank
writes the best and the average as files. Writing and reading folders imports
torch.distributed.checkpoint (DCP), which takes a second.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.files import make_folder, sync
from deepfast.mt.models import kind_of
from deepfast.mt.models.checkpoint import (
    RUN,
    CheckpointError,
    average_checkpoints,
    check_config,
    load_checkpoint,
    not_written,
    read_run,
    save_checkpoint,
)
from deepfast.mt.training.environment import random_state, set_random_state
from deepfast.mt.training.errors import OtherRankError
from deepfast.mt.training.parallel import like, whole
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.recipe import TrainSection
from deepfast.mt.training.run_folder import AVERAGE, BEST, STEP, prune, step_checkpoints
from deepfast.mt.training.trainer import Trainer, Window

VALIDATION = ("best_nll", "best_step", "since_best", "validated_at")
"""Attributes of a trainer that early stopping needs after resuming."""


class Saving:
    """The checkpoints of a run in a folder, and what is in them. All ranks call each method."""

    def __init__(self, folder: Path, trainer: Trainer, section: TrainSection):
        self.folder, self.trainer, self.section = folder, trainer, section
        self.ranks = trainer.ranks
        # A best checkpoint for another dev text does not count.
        self._dev = hashlib.sha256(repr(trainer.corpus.dev).encode()).hexdigest()[:16]

    def _described(self) -> dict[str, Any]:
        """The keys of any checkpoint, without the model."""
        trainer = self.trainer
        return {
            "step": trainer.step,
            "kind": kind_of(trainer.model.config),
            "config": asdict(trainer.model.config),
            "vocabulary": trainer.corpus.vocabulary.to_bytes(),
            "recipe": trainer.recipe.to_dict(),
        }

    def step(self) -> Path:
        """Saves what the run resumes from, and removes what is older than the recipe keeps.

        The optimizer's rates, betas and the like are in the recipe, which may change.
        """
        trainer, ranks = self.trainer, self.ranks
        path = self.folder / STEP.format(trainer.step)
        training = {
            "batches": trainer.corpus.batches.state_dict(),
            "random": ranks.objects(random_state(trainer.device)),
            "validation": {name: getattr(trainer, name) for name in VALIDATION},
            "dev": self._dev,
            "window": asdict(trainer.window),
            "seconds": trainer.seconds,
        }
        content = self._described() | {"training": training}
        if ranks.by_first(path.exists):
            # A run that ends where it was resumed has validated since, with the same tensors.
            ranks.by_first(lambda: save_checkpoint(path / RUN, read_run(path) | content))
        else:
            _write_folder(path, content, self._tensors(), ranks)
        ranks.by_first(self._prune)
        return path

    def _prune(self) -> None:
        prune(self.folder, self.section.keep_last, self.section.save_every)

    def best(self) -> None:
        """Saves the model that has the lowest dev NLL so far."""
        weights = {}
        for name, tensor in self.trainer.model.state_dict().items():
            tensor = whole(tensor)
            # The other ranks only take part in gathering it.
            if self.ranks.first:
                weights[name] = tensor.cpu()
        content = self._described() | {"model": weights}
        self.ranks.by_first(lambda: save_checkpoint(self.folder / BEST, content))

    def average(self) -> tuple[Path, int]:
        """Averages the newest checkpoints and gives the model their weights; returns the file and
        of how many it is."""
        path = self.folder / AVERAGE

        def write() -> int:
            self._prune()
            paths = step_checkpoints(self.folder)[-self.section.average_last :]
            save_checkpoint(path, self._described() | {"model": average_checkpoints(paths)})
            return len(paths)

        count = self.ranks.by_first(write)
        own, mean = self.trainer.model.state_dict(), load_checkpoint(path)["model"]
        self.trainer.model.load_state_dict({name: like(x, own[name]) for name, x in mean.items()})
        return path, count

    def restore(self, content: dict[str, Any], path: Path) -> list[str]:
        """Lets a new trainer continue exactly where the checkpoint was taken.

        Args:
            content: of `read_run`.
            path: of the checkpoint.

        Returns:
            What is not as before, in words.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model or of other text.
        """
        trainer, state = self.trainer, content["training"]
        check_config(path, content, trainer.model.config)
        try:
            trainer.corpus.batches.load_state_dict(state["batches"])
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self._read_tensors(path, content)
        trainer.step, trainer.seconds = content["step"], state["seconds"]
        for name in VALIDATION:
            setattr(trainer, name, state["validation"][name])
        trainer.window = Window(**state["window"])
        changed = []
        # Restored last, because building the model drew from the same generators.
        if len(state["random"]) == self.ranks.size:
            set_random_state(state["random"][self.ranks.rank], trainer.device)
        else:
            self.ranks.seed(trainer.recipe.train.seed, trainer.step)
            changed.append(f"ranks {len(state['random'])} -> {self.ranks.size}, with new dropout")
        differs = state["dev"] != self._dev
        if trainer.best_step and (differs or not self.ranks.by_first((self.folder / BEST).exists)):
            trainer.best_nll, trainer.best_step, trainer.since_best = math.inf, 0, 0
            # A run that ends at this step validates first.
            trainer.validated_at = 0
            lost = "the dev text" if differs else f"no {BEST} in this folder"
            changed.append(f"{lost}; the next validation is the best so far")
        return changed

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the model and of the optimizer's state, by their names in a folder."""
        from deepfast.mt.models.checkpoint_folder import MODEL, OPTIMIZER

        model, state = self.trainer.model, self.trainer.optimizer.state
        tensors = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
        # Not by get_state_dict of DCP: it makes a step with an optimizer that has no state.
        for name, p in model.named_parameters():
            fields = state.get(p, {})
            tensors |= {f"{OPTIMIZER}{name}.{field}": x for field, x in fields.items()}
        return tensors

    def _read_tensors(self, path: Path, content: dict[str, Any]) -> None:
        """Reads this rank's shares of the model and of the optimizer's state, in place."""
        from deepfast.mt.models.checkpoint_folder import OPTIMIZER, check_files, read_tensors

        trainer, ranks, table = self.trainer, self.ranks, content["tensors"]
        parameters = dict(trainer.model.named_parameters())
        # Makes the state that the checkpoint has: that of parameters which had a gradient.
        for key in (key for key in table if key.startswith(OPTIMIZER)):
            name, _, field = key.removeprefix(OPTIMIZER).rpartition(".")
            p = parameters[name]
            # Adam's number of steps is a scalar; the rest has the shape of the parameter.
            empty = torch.zeros((), device=p.device) if field == "step" else torch.zeros_like(p)
            trainer.optimizer.state[p][field] = empty
        check_files(path, content["files"], ranks.rank, ranks.size)
        read_tensors(path, table, self._tensors(), ranks.slow)


def _write_folder(
    path: Path, content: dict[str, Any], tensors: dict[str, Tensor], ranks: Ranks
) -> None:
    """Writes a step's folder from all ranks. Even after a crash it is there whole, or not at all.

    Args:
        content: the keys without tensors; that of the first rank counts.
        tensors: of this rank, whole or shares.

    Raises:
        CheckpointError, DataError: this rank cannot write, or the first cannot finish.
        OtherRankError: another rank cannot write, and says so.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    from deepfast.mt.models.checkpoint_folder import check_sum, write_tensors

    temporary = path.with_name(f".{path.name}.part")

    def finish() -> None:
        save_checkpoint(temporary / RUN, content | {"tensors": table, "files": files})
        os.replace(temporary, path)
        sync(path.parent)

    try:
        ranks.by_first(lambda: make_folder(temporary))
        table = write_tensors(temporary, tensors, ranks.slow)
        mine = {file.name: check_sum(file) for file in temporary.glob(f"__{ranks.rank}_*.distcp")}
        files = {name: total for each in ranks.objects(mine) for name, total in each.items()}
        ranks.by_first(finish)
    except CheckpointException as error:
        if ranks.rank not in error.failures:
            raise OtherRankError(str(path)) from error
        raise not_written(path, error.failures[ranks.rank][0]) from error
    finally:
        # Another rank may have lost the first one, which is about to rename the folder.
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
