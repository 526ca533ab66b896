"""What a run saves: a step to resume from, the best and the average to translate with.

A process alone writes files. The ranks of torchrun write each step as a folder together, and the
first of them writes the best and the average as files without what resuming needs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from deepfast.mt.models.checkpoint import check_keys
from deepfast.mt.models.checkpoint_file import CheckpointError
from deepfast.mt.training.checkpoint import (
    KEYS,
    average_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from deepfast.mt.training.parallel import whole
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
from deepfast.mt.training.trainer import Trainer


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
    """The checkpoints of a run in a folder."""

    def __init__(self, folder: Path, trainer: Trainer, section: TrainSection):
        self.folder, self.trainer, self.section = folder, trainer, section
        self.ranks = trainer.ranks

    def find_best(self, start: Path, state: dict[str, Any]) -> str | None:
        """Forgets the best so far where `best.pt` is not that of the state that the run resumes
        with, or where the dev text is another. The next validation is then the best. Returns why,
        in words."""
        trainer, path = self.trainer, self.folder / BEST

        def other() -> str | None:
            if state.get("dev", trainer.dev) != trainer.dev:
                return "the dev text"
            if start.resolve().parent != self.folder.resolve() or not path.exists():
                return f"no {BEST} in this folder"
            try:
                found = load_checkpoint(path, optimizer=False)["step"]
            except CheckpointError:
                return f"{BEST} is damaged"
            # A run that was killed may have written it after its last checkpoint.
            return None if found == trainer.best_step else f"{BEST} is of step {found}"

        why = self.ranks.by_first(other)
        if why is None or trainer.best_step == 0:
            return None
        trainer.best_nll, trainer.best_step = math.inf, 0
        return f"{why}; the next validation is the best so far"

    def has_step(self) -> bool:
        """Whether the folder has a checkpoint of this step, of any number of ranks."""
        step = self.trainer.step
        return self.ranks.by_first(lambda: step in map(step_of, step_checkpoints(self.folder)))

    def step(self) -> Path:
        """Saves what the run resumes from, and removes what is older than the recipe keeps."""
        path = self.folder / STEP_FILE.format(self.trainer.step)
        content = self.trainer.state_dict()
        if self.ranks.alone:
            save_checkpoint(path, content)
        else:
            from deepfast.mt.models.checkpoint_folder import parted
            from deepfast.mt.training.checkpoint_folder import save_folder

            path = path.with_suffix("")
            save_folder(path, *parted(content, self.trainer.parameter_names()), self.ranks)
        keep, every = self.section.keep_last, self.section.save_every
        self.ranks.by_first(lambda: prune(self.folder, keep, every))
        return path

    def best(self) -> None:
        """Saves the model that has the lowest dev NLL so far."""
        path, trainer = self.folder / BEST, self.trainer
        if self.ranks.alone:
            save_checkpoint(path, trainer.state_dict())
            return
        weights = {}
        for name, tensor in trainer.model.state_dict().items():
            tensor = whole(tensor)
            # The other ranks only take part in gathering it.
            if self.ranks.first:
                weights[name] = tensor.cpu()
        self.ranks.by_first(lambda: save_checkpoint(path, trainer.model_state(weights)))

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
            save_checkpoint(path, self.trainer.model_state(weights))

        self.ranks.by_first(write)
        self.trainer.load_weights(load_checkpoint(path)["model"], path)
        return path, len(paths)
