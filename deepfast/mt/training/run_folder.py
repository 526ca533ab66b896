"""A run's folder: one run at a time, which checkpoints it keeps, and where to resume."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from deepfast.files import make_folder
from deepfast.mt.models.checkpoint import CheckpointError
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.report import METRICS

STEP = "step-{:08d}"
"""The folder of a step."""
BEST, AVERAGE = "best.pt", "average.pt"
LOCK = ".lock"


@contextlib.contextmanager
def only_run(folder: Path, argument: str = "output=FOLDER") -> Iterator[None]:
    """Makes a folder, and keeps other runs out of it until the block or the process ends.

    Args:
        argument: how to choose another folder.

    Raises:
        TrainingError: another process has the folder, or it cannot be written.
        DataError: it cannot be made.
    """
    make_folder(folder)
    try:
        held = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout as error:
        raise TrainingError(
            f"{folder}: expected a folder that no other run uses, got one that another process "
            f"uses: wait until it ends, or choose another folder with {argument}"
        ) from error
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written ({error.strerror})") from error
    with held:
        yield


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by step, oldest first, without best and average."""
    # Only digits: a copy that the user named step-00001000-good must not be pruned.
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def prune(folder: Path, keep: int, every: int) -> None:
    """Leaves the last `keep` checkpoints at multiples of `every`, and the newest one.

    A checkpoint that an interrupted run wrote at another step goes once a later one exists, so that
    a resumed run keeps and averages the same checkpoints as an uninterrupted one.
    """
    paths = step_checkpoints(folder)
    planned = [path for path in paths if int(path.name[-8:]) % every == 0][-keep:]
    for path in paths[:-1]:
        if path not in planned:
            # Half a folder must not look like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.part")))


def recover(folder: Path) -> None:
    """Removes what a run that was killed had written, or removed, in part."""
    # Those of steps are folders, all others files.
    for part in folder.glob(".*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink()


def checkpoint_to_resume(output: str, resume: bool) -> Path | None:
    """The checkpoint to continue from, or None for a new run. Two runs never share a folder.

    Args:
        output, resume: of the recipe.

    Raises:
        CheckpointError: the folder holds another run.
    """
    folder = Path(output)
    recover(folder)
    present = step_checkpoints(folder)
    # Where torchrun has started the ranks again, the folder is their own.
    if resume or restarts():
        return present[-1] if present else None
    files = [folder / name for name in (BEST, AVERAGE, METRICS)]
    ours = [*present, *(file for file in files if file.exists())]
    if ours:
        # Without a checkpoint resume=true would begin at step 0.
        again = "continue it with resume=true, or " if present else ""
        raise CheckpointError(
            f"{folder}: expected a new folder, got one with an earlier run ({ours[0].name}): "
            f"{again}choose another with output=FOLDER"
        )
    return None
