"""Atomic file writes, and lazy imports of optional packages.

Each error message is one sentence.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO


class DataError(ValueError):
    """Text, a vocabulary or batches that cannot be used; one sentence says why."""


class MissingPackage(DataError, ImportError):
    """An optional package is not installed; the sentence names the extra that installs it."""


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional module by its dotted name.

    Raises:
        MissingPackage: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        extra = "report" if package in ("matplotlib", "jinja2") else "train"
        raise MissingPackage(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"pip install 'deepfast[{extra}]'"
        ) from error


def cache_folder() -> Path:
    """deepfast's cache folder: DEEPFAST_CACHE, else "deepfast" in the XDG cache folder."""
    if given := os.environ.get("DEEPFAST_CACHE"):
        return Path(os.path.expanduser(given))
    # Not Path.home(), which raises where the user has no home folder. The path then begins with ~,
    # so the cache is in a folder named ~ in the working folder.
    home = Path(os.path.expanduser("~"))
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "deepfast"


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file, which replaces ``path`` at the end of the block. If the block
    fails, ``path`` does not change.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full.
    """
    # In the same folder: a rename across file systems is a copy, which is not atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    stream = open(temporary, "wb")  # noqa: SIM115 -- a file that was not made is not removed
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file to write, so that a reader sees the old content or the new, never a part.

    Raises:
        DataError: the folder is missing or not writable.
    """
    # Write what a link points to; the link stays.
    path = Path(path).resolve()
    # A pipe or a device must not be replaced by a file.
    special = path.exists() and not path.is_file()
    try:
        with open(path, "wb") if special else replaced(path) as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a whole file, see `written`."""
    with written(path) as stream:
        stream.write(content)


def sync(path: Path) -> None:
    """Makes a file, or the names of new files in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises an error if an output file cannot be written. Call it before the work.

    Raises:
        DataError: the folder is missing or not writable, or the path is a folder.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise DataError(f"{path}: {path.parent} is not an existing folder")
    if path.is_dir():
        raise DataError(f"{path}: expected a file, got a folder")
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"{path}: the folder {path.parent} is not writable")


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder and its parents, like ``mkdir -p``.

    Raises:
        DataError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be made ({error.strerror or error})") from error
