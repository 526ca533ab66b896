"""What a run saves: a step to resume from, the best and the average to translate with.

A process alone writes files. The ranks of torchrun write each step as a folder together, and the
first of them writes the best and the average as files without what resuming needs. Only folders
import torch.distributed.checkpoint, which takes a second.
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
import torch.distributed as dist
from torch import Tensor, nn

from deepfast.mt.models import kind_of
from deepfast.mt.models.checkpoint import check_keys, check_weights
from deepfast.mt.training.checkpoint import (
    KEYS,
    average_checkpoints,
    check_config,
    load_checkpoint,
    load_weights,
    not_written,
    save_checkpoint,
    sync_folder,
    write_dict,
)
from deepfast.mt.training.environment import random_state, set_random_state
from deepfast.mt.training.errors import CheckpointError, OtherRankError
from deepfast.mt.training.parallel import like, whole
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.recipe import TrainSection
from deepfast.mt.training.run_folder import (
    AVERAGE,
    BEST,
    STEP_FILE,
    newest_checkpoints,
    prune,
    step_checkpoints,
    step_of,
)
from deepfast.mt.training.trainer import Trainer, Window

VALIDATION = ("best_nll", "best_step", "since_best", "validated_at")
"""Attributes of a trainer that early stopping needs after resuming."""


def read_start(path: Path, ranks: Ranks) -> dict[str, Any]:
    """The checkpoint to resume from. From a folder the ranks read their tensors later, each its
    share.

    Raises:
        CheckpointError: it cannot be read, or no run can resume from it.
    """
    if ranks.alone or not path.is_dir():
        content = load_checkpoint(path)
    else:
        from deepfast.mt.models.checkpoint_folder import read_run

        content = read_run(path)
        check_keys(path, content, {key: kind for key, kind in KEYS.items() if key != "model"})
    if "training" not in content:
        raise CheckpointError(
            f"{path}: expected a checkpoint to resume from, got one without optimizer state, such "
            "as an average"
        )
    return content


class Saving:
    """The checkpoints of a run in a folder: what is in them, and when a run writes which."""

    def __init__(self, folder: Path, trainer: Trainer, section: TrainSection):
        self.folder, self.trainer, self.section = folder, trainer, section
        self.ranks = trainer.ranks
        # A best checkpoint for another dev text does not count.
        self._dev = hashlib.sha256(repr(trainer.corpus.dev).encode()).hexdigest()[:16]

    def _model(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """What translating needs: the trainer's model with ``weights``."""
        trainer = self.trainer
        return {
            "step": trainer.step,
            "kind": kind_of(trainer.model.config),
            "config": asdict(trainer.model.config),
            "model": weights,
            "vocabulary": trainer.corpus.vocabulary.to_bytes(),
            "recipe": trainer.recipe.to_dict(),
        }

    def _content(self) -> dict[str, Any]:
        """Everything a checkpoint holds: plain values and tensors. Ranks call it together."""
        trainer, optim = self.trainer, self.trainer.recipe.optim
        random = random_state(trainer.device)
        return self._model(trainer.model.state_dict()) | {
            "training": {
                "optimizer": trainer.optimizer.state_dict(),
                "schedule": {"step": trainer.step, "peak": optim.lr, "warmup": optim.warmup},
                "batches": trainer.corpus.batches.state_dict(),
                "random": random if self.ranks.alone else self.ranks.objects(random),
                "validation": {name: getattr(trainer, name) for name in VALIDATION},
                "dev": self._dev,
                "window": asdict(trainer.window),
                "seconds": trainer.seconds,
            }
        }

    def restore(self, content: dict[str, Any], path: Path) -> list[str]:
        """Lets a new trainer continue exactly where the checkpoint was taken. Learning rate, betas
        and the like come from the recipe, which may have changed.

        Args:
            content: of `read_start`.
            path: its name in errors.

        Returns:
            What is not as before, in words.

        Raises:
            CheckpointError: the checkpoint is of another model or of other text, or lacks a part.
        """
        trainer = self.trainer
        check_config(path, content, trainer.model.config)
        try:
            trainer.corpus.batches.load_state_dict(content["training"]["batches"])
            if "model" not in content:
                content = load_share(path, content, trainer.model, self.ranks)
            self._load_weights(content["model"], path)
            state = content["training"]
            self._load_optimizer(state["optimizer"])
            trainer.step, trainer.seconds = content["step"], float(state["seconds"])
            for name in VALIDATION:
                setattr(trainer, name, state["validation"][name])
            trainer.window = Window(**state["window"])
            changed = []
            # Restored last, because building the model drew from the same generators.
            states = state["random"] if isinstance(state["random"], list) else [state["random"]]
            if len(states) == self.ranks.size:
                set_random_state(states[self.ranks.rank], trainer.device)
            else:
                self.ranks.seed(trainer.recipe.train.seed, trainer.step)
                changed.append(f"ranks {len(states)} -> {self.ranks.size}, with new dropout")
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint lacks what resuming needs ({error!r})"
            ) from error
        why = self.ranks.by_first(lambda: self._other_best(path, state.get("dev", self._dev)))
        if why is not None and trainer.best_step > 0:
            trainer.best_nll, trainer.best_step = math.inf, 0
            changed.append(f"{why}; the next validation is the best so far")
        return changed

    def _load_weights(self, weights: dict[str, Tensor], path: Path) -> None:
        own = self.trainer.model.state_dict()
        mine = {n: like(w, own[n]) if n in own else w for n, w in weights.items()}
        load_weights(self.trainer.model, mine, path)

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        optimizer = self.trainer.optimizer
        own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Copies: the tensors are mapped from the file, which may be deleted.
        state = {
            number: {
                name: like(value, parameters[number]).clone() for name, value in fields.items()
            }
            for number, fields in saved["state"].items()
        }
        optimizer.load_state_dict(saved | {"state": state})
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)

    def _other_best(self, start: Path, dev: str) -> str | None:
        """Why `best.pt` is not the best of the run that resumes, in words; None if it is."""
        path = self.folder / BEST
        if dev != self._dev:
            return "the dev text"
        if start.resolve().parent != self.folder.resolve() or not path.exists():
            return f"no {BEST} in this folder"
        try:
            found = load_checkpoint(path, optimizer=False)["step"]
        except CheckpointError:
            return f"{BEST} is damaged"
        # A run that was killed may have written it after its last checkpoint.
        return None if found == self.trainer.best_step else f"{BEST} is of step {found}"

    def has_step(self) -> bool:
        """Whether the folder has a checkpoint of this step, of any number of ranks."""
        step = self.trainer.step
        return self.ranks.by_first(lambda: step in map(step_of, step_checkpoints(self.folder)))

    def step(self) -> Path:
        """Saves what the run resumes from, and removes what is older than the recipe keeps."""
        path = self.folder / STEP_FILE.format(self.trainer.step)
        content, trainer = self._content(), self.trainer
        if self.ranks.alone:
            save_checkpoint(path, content)
        else:
            from deepfast.mt.models.checkpoint_folder import parted

            path = path.with_suffix("")
            names = {id(p): name for name, p in trainer.model.named_parameters()}
            groups = trainer.optimizer.param_groups
            numbered = [names[id(p)] for group in groups for p in group["params"]]
            save_folder(path, *parted(content, numbered), self.ranks)
        keep, every = self.section.keep_last, self.section.save_every
        self.ranks.by_first(lambda: prune(self.folder, keep, every))
        return path

    def best(self) -> None:
        """Saves the model that has the lowest dev NLL so far."""
        path, trainer = self.folder / BEST, self.trainer
        if self.ranks.alone:
            save_checkpoint(path, self._content())
            return
        weights = {}
        for name, tensor in trainer.model.state_dict().items():
            tensor = whole(tensor)
            # The other ranks only take part in gathering it.
            if self.ranks.first:
                weights[name] = tensor.cpu()
        self.ranks.by_first(lambda: save_checkpoint(path, self._model(weights)))

    def average(self) -> tuple[Path, int]:
        """Averages the newest checkpoints and gives the model their weights; returns the file and
        of how many it is."""
        section, path = self.section, self.folder / AVERAGE
        paths = newest_checkpoints(self.folder, section.average_last, section.save_every)

        def write() -> None:
            try:
                weights = average_checkpoints(paths)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}; all steps are done, and only the average is missing: move this one "
                    "out of the folder and continue with resume=true"
                ) from error
            save_checkpoint(path, self._model(weights))

        self.ranks.by_first(write)
        self._load_weights(load_checkpoint(path)["model"], path)
        return path, len(paths)


def save_folder(
    path: Path, content: dict[str, Any], tensors: dict[str, Tensor], ranks: Ranks
) -> None:
    """Write a checkpoint from all ranks. Even after a crash `path` is the old one or the new one.

    Args:
        content: the keys without tensors; that of the first rank counts.
        tensors: of this rank, whole or shares.

    Raises:
        CheckpointError: this rank cannot write, or the first cannot finish.
        OtherRankError: another rank cannot write, and says so.
    """
    import torch.distributed.checkpoint as dcp

    from deepfast.mt.models.checkpoint_folder import check_sum

    temporary = path.with_name(f".{path.name}.part")
    try:
        ranks.by_first(lambda: _begin(temporary))
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), process_group=ranks.slow)
        mine = {file.name: check_sum(file) for file in temporary.glob(f"__{ranks.rank}_*.distcp")}
        files = {name: total for each in ranks.objects(mine) for name, total in each.items()}
        ranks.by_first(lambda: _finish(temporary, path, content, files))
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        if isinstance(error, (OtherRankError, dist.DistError)):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        cause: BaseException = error
        if isinstance(error, dcp.api.CheckpointException):
            if ranks.rank not in error.failures:
                raise OtherRankError(str(path)) from error
            cause = error.failures[ranks.rank][0]
        raise not_written(path, cause) from error


def _begin(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _finish(temporary: Path, path: Path, content: dict[str, Any], files: dict[str, int]) -> None:
    from deepfast.mt.models.checkpoint_folder import METADATA, RUN, check_sum

    files = files | {METADATA: check_sum(temporary / METADATA)}
    write_dict(temporary / RUN, {"files": files} | content)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_share(path: Path, content: dict[str, Any], model: nn.Module, ranks: Ranks) -> dict:
    """The content of a checkpoint with this rank's share of each tensor; all ranks call it.

    Args:
        content: of its ``run.pt``.
        model: whose parameters say what this rank's share is. They get the values.
    """
    from deepfast.mt.models.checkpoint_folder import (
        MODEL,
        OPTIMIZER,
        check_files,
        joined,
        read_tensors,
        shapes,
    )

    found = shapes(path)
    check_weights(path, model, {name.removeprefix(MODEL): tuple(entry.size)
                  for name, entry in found.items() if name.startswith(MODEL)})  # fmt: skip
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, entry in found.items():
            # What the optimizer keeps for p has its shape, but for the number of steps.
            if key.rpartition(".")[0] == f"{OPTIMIZER}{name}":
                tensors[key] = torch.zeros_like(p) if entry.size else torch.zeros(())
    check_files(path, content["files"], ranks.rank, ranks.size)
    read_tensors(path, tensors, ranks.slow)
    return joined(path, content, tensors)
