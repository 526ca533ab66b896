"""Files that torch.save wrote, with their check sums compared, which torch.load does not do."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

FORMAT = "deepfast-checkpoint"
VERSION = 1
BROKEN = (zipfile.BadZipFile, zlib.error, ValueError)
"""What reading a broken archive raises."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, written, or resumed."""


def read_file(path: Path) -> dict[str, Any]:
    """The dict in a file, its format and version checked. Its tensors are mapped.

    Raises:
        CheckpointError: the file does not exist, is damaged, is no checkpoint, or is of a newer
            version.
    """
    # Opening a pipe would wait for a writer.
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: expected a deepfast checkpoint, got no regular file")
    try:
        with open(path, "rb") as stream:
            zipped = stream.read(2) == b"PK"
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = None
        if damaged is None:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    # A ValueError: a name in the archive that is no UTF-8, or an offset that no file has.
    except (*BROKEN, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # torch.save writes a zip archive, so a broken archive is likely a damaged checkpoint.
        if zipped and isinstance(error, BROKEN):
            raise CheckpointError(f"{path}: the checkpoint is cut short or damaged") from error
        raise CheckpointError(
            f"{path}: expected a deepfast checkpoint, got a file of another kind"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path}: the checkpoint is damaged in its part {damaged}")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: expected a deepfast checkpoint, got other torch.save content"
        )
    version = content.get("version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(
            f"{path}: expected a checkpoint of version 1 or later, got {version!r}"
        )
    if version > VERSION:
        raise CheckpointError(
            f"{path}: the checkpoint was written by a newer deepfast: expected version {VERSION} "
            f"at most, got {version}"
        )
    return content
