"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from deepfast.mt.training.environment import new_folder
from deepfast.mt.training.errors import TrainingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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
    with new_folder(folder):
        path = folder / LOCK
        stream = _locked(path, argument)
        try:
            yield
        finally:
            # An error would hide that of the run. A file that stays is not locked.
            with contextlib.suppress(OSError):
                if is_at(stream, path):
                    path.unlink()
            stream.close()


def _locked(path: Path, argument: str) -> TextIO:
    while True:
        try:
            stream = open(path, "a+", encoding="utf-8")  # noqa: SIM115 -- the lock lives with it
        except OSError as error:
            raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error
        if fcntl is None:
            return stream
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            owner = stream.read() or "another process"
            stream.close()
            raise TrainingError(
                f"{path.parent}: expected a folder in which nothing runs, got one in which {owner} "
                f"does: wait until it has ended, or choose another with {argument}"
            ) from error
        except OSError:
            # Some file systems have no locks.
            return stream
        # The run before may have removed the file after it was opened here.
        if is_at(stream, path):
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}")
            stream.flush()
            return stream
        stream.close()


def is_at(stream: TextIO, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
