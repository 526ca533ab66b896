"""A run's folder: one run at a time, which checkpoints it keeps, and where to resume."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from deepfast.files import make_folder
from deepfast.mt.models.checkpoint import CheckpointError, load_checkpoint
from deepfast.mt.training.errors import TrainingError
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.report import METRICS

STEP = "step-{:08d}"
"""The folder of a step."""
BEST, AVERAGE = "best.pt", "average.pt"
LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes a folder before the block. If the block fails, removes the folders that it made and
    that are still empty.

    So an error about the folder is raised before the work, and a run that did not start leaves no
    folder.

    Raises:
        DataError: it cannot be made.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise


@contextlib.contextmanager
def only_run(folder: Path, argument: str = "output=FOLDER") -> Iterator[None]:
    """Makes a folder, and keeps other runs out of it until the block or the process ends.

    Args:
        argument: how to choose another folder.

    Raises:
        TrainingError: another process has the folder, or it cannot be written.
        DataError: it cannot be made.
    """
    path = folder / LOCK
    with new_folder(folder), contextlib.ExitStack() as held:
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", "utf-8")
            held.callback(_release, lock, path.stat())
        except Timeout as error:
            owner = path.read_text("utf-8") or "another process"
            raise TrainingError(
                f"{folder}: expected a folder that no other run uses, got one that {owner} uses: "
                f"wait until that process ends, or choose another folder with {argument}"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error
            path.unlink(missing_ok=True)
        yield


def _release(lock: FileLock, made: os.stat_result) -> None:
    """Removes the file, unless the folder was replaced, and releases the lock."""
    # An error here would hide the run's error. A lock file that remains is not locked.
    with contextlib.suppress(OSError):
        path = Path(lock.lock_file)
        if os.path.samestat(made, path.stat()):
            path.unlink()
    lock.release()


def step_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run by step, oldest first, without best and average."""
    # Only digits: a copy that the user named step-00001000-good must not be pruned.
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def newest_checkpoints(folder: str | os.PathLike[str], count: int, every: int) -> list[Path]:
    """The last `count` checkpoints. Only the newest and those at multiples of `every` count.

    A checkpoint that an interrupted run wrote at another step is ignored once a later one exists. A
    resumed run keeps and averages the same checkpoints as an uninterrupted one.
    """
    paths = step_checkpoints(folder)
    return [*(path for path in paths[:-1] if step_of(path) % every == 0), *paths[-1:]][-count:]


def prune(folder: str | os.PathLike[str], keep: int, every: int = 1) -> None:
    """Removes checkpoints that neither resuming nor `newest_checkpoints` of `keep` will need."""
    paths = step_checkpoints(folder)
    planned = [path for path in paths if step_of(path) % every == 0][-keep:]
    for path in paths[:-1]:
        if path not in planned:
            # Half a folder must not look like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.part")))


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-"))


def recover(folder: Path) -> None:
    """Repairs the folder of a run that was killed while it wrote or removed a checkpoint: restores
    the old checkpoint where the new one was not moved into its place, and removes what is partial.
    """
    for old in folder.glob(".step-*.old"):
        path = old.with_name(old.name[1:].removesuffix(".old"))
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, path)
    # Those of steps are folders, all others files.
    for part in folder.glob(".*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink()


def checkpoint_to_resume(output: str, resume: bool | str) -> Path | None:
    """The checkpoint to continue from, or None for a new run. Two runs never share a folder.

    Args:
        output, resume: of the recipe.

    Raises:
        CheckpointError: the folder holds another run, or later checkpoints of this one.
    """
    folder = Path(output)
    if resume is not False:
        recover(folder)
    present = step_checkpoints(folder)
    if resume is True:
        return present[-1] if present else None
    path = Path(resume) if resume else None
    if path is None or path.resolve().parent != folder.resolve():
        ours = [*present, *(folder / n for n in (BEST, AVERAGE, METRICS) if (folder / n).exists())]
        # A run that failed before its first step leaves an empty metrics file.
        ours = [file for file in ours if file.name != METRICS or file.stat().st_size]
        # If torchrun restarts the ranks before a checkpoint exists, the metrics are their own.
        if present or (ours and not restarts()):
            # Without a checkpoint resume=true would begin at step 0.
            again = "continue it with resume=true, or " if present else ""
            raise CheckpointError(
                f"{folder}: expected a new folder, got one with an earlier run ({ours[0].name}): "
                f"{again}choose another with output=FOLDER"
            )
        return path
    # Read the step from the checkpoint: a copy may have any name.
    if present and step_of(present[-1]) > read_start(path)["step"]:
        raise CheckpointError(
            f"{folder}: expected no checkpoint later than {path}, got "
            f"{present[-1].name}: choose another folder with output=FOLDER"
        )
    return path


def read_start(path: Path) -> dict[str, Any]:
    """The keys of the step to resume from, without its tensors; `Saving.restore` reads those.

    Raises:
        CheckpointError: it cannot be read, or no run can resume from it.
    """
    from deepfast.mt.models.checkpoint_folder import read_run

    if path.is_dir():
        return read_run(path)
    load_checkpoint(path)
    raise CheckpointError(
        f"{path}: expected the folder of a step to resume from, such as step-00001000, got a file "
        "to translate with"
    )


def intact_instead(folder: Path) -> str:
    """Advice to append to the error about a damaged newest checkpoint; an empty string if the
    newest checkpoint is intact."""
    from deepfast.mt.models.checkpoint_folder import check_files

    damaged: list[str] = []
    for path in reversed(step_checkpoints(folder)):
        try:
            check_files(path, read_start(path)["files"])
        except CheckpointError:
            damaged.append(path.name)
            continue
        if not damaged:
            return ""
        return (
            f"; the newest intact one is {path}: move {', '.join(damaged)} out of the folder and "
            f"continue with resume={path}"
        )
    return "; no other one is intact" if damaged else ""
