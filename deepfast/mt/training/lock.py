"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from deepfast.mt.training.environment import new_folder
from deepfast.mt.training.errors import TrainingError

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


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
                f"{folder}: expected a folder in which nothing runs, got one in which {owner} "
                f"does: wait until it has ended, or choose another with {argument}"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error
            path.unlink(missing_ok=True)
        yield


def _release(lock: FileLock, made: os.stat_result) -> None:
    """Removes the file, unless the folder was replaced, and gives the lock back."""
    # An error would hide that of the run. A file that stays is not locked.
    with contextlib.suppress(OSError):
        path = Path(lock.lock_file)
        if os.path.samestat(made, path.stat()):
            path.unlink()
    lock.release()
