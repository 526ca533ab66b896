"""Checkpoints of several ranks: a folder that torch.distributed.checkpoint writes.

    run.pt           the keys of a checkpoint file, without its tensors; and `files`, the check sums
                     of the others
    .metadata        which part of which tensor is where
    __0_0.distcp     the tensors of rank 0, and so on

The tensors are ``model.NAME``, a parameter or a buffer, and ``optimizer.NAME.FIELD``, what the
optimizer keeps for a parameter.
"""

import enum
import io
import os
import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from deepfast.mt.models.checkpoint import CheckpointError, read_file

RUN, METADATA = "run.pt", ".metadata"
MODEL, OPTIMIZER = "model.", "optimizer."

SAFE = {
    "torch": {"Size", "device", "dtype"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip
"""Module -> the names that the metadata of a checkpoint may hold."""


def _member(owner: Any, name: str) -> Any:
    """The member of an enum, which Python 3.11.0 to 3.11.3 writes as ``getattr(enum, name)``."""
    if not isinstance(owner, enum.EnumMeta):
        raise pickle.UnpicklingError(f"unexpected getattr of {type(owner).__name__}")
    return owner[name]


class _Unpickler(pickle.Unpickler):
    """Refuses what `pickle` would otherwise run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in SAFE.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"unexpected {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads the metadata without running code of the file, and compares the tensors' check sums."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        content = Path(self.path, METADATA).read_bytes()
        try:
            metadata = _Unpickler(io.BytesIO(content)).load()
        # Damaged data can raise anything: pickle lists only some of it.
        except Exception as error:
            raise pickle.UnpicklingError(str(error)) from error
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"unexpected {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a checkpoint folder, without its tensors, its format and version checked.

    Raises:
        CheckpointError: the folder is not such a checkpoint, or it is damaged.
    """
    for name in (RUN, METADATA):
        if not Path(path, name).exists():
            raise CheckpointError(f"{path}: expected a checkpoint, got a folder without {name}")
    content = read_file(Path(path, RUN))
    # Folders of earlier versions have no check sum of it.
    check_files(Path(path), {k: v for k, v in content.get("files", {}).items() if k == METADATA})
    shapes(path)
    return content


def check_sum(path: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with open(path, "rb") as stream:
        while part := stream.read(2**24):
            found = zlib.crc32(part, found)
    return found


def check_files(path: Path, files: dict[str, int], rank: int = 0, size: int = 1) -> None:
    """Compares the files of a checkpoint folder with their check sums.

    Args:
        rank, size: of several ranks each reads some of the files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name in sorted(files)[rank::size]:
        try:
            damaged = check_sum(path / name) != files[name]
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{path / name}: cannot be read ({reason})") from error
        if damaged:
            raise CheckpointError(f"{path}: the checkpoint is damaged in its file {name}")


def shapes(path: str | os.PathLike[str]) -> dict[str, TensorStorageMetadata]:
    """Name -> size and type of every tensor in a checkpoint folder."""
    try:
        found = Reader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: the checkpoint is cut short or damaged") from error
    return {k: entry for k, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_folder(path: str | os.PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
    """A checkpoint folder as the content of a checkpoint file, with whole tensors on the CPU.

    Args:
        optimizer: whether to read the optimizer's state, twice the size of the model.
    """
    content = read_run(path)
    check_files(Path(path), content.get("files", {}))
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in shapes(path).items()
        if optimizer or name.startswith(MODEL)
    }
    read_tensors(path, tensors)
    return joined(path, content, tensors)


def parted(content: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of a checkpoint file as that of a folder's ``run.pt`` and the tensors beside it.

    Args:
        names: of the parameters, in the order in which the optimizer numbers them.
    """
    optimizer = content["training"]["optimizer"]
    tensors = {f"{MODEL}{name}": tensor for name, tensor in content["model"].items()}
    for number, state in optimizer["state"].items():
        tensors |= {f"{OPTIMIZER}{names[number]}.{field}": x for field, x in state.items()}
    groups = [
        group | {"params": [names[number] for number in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    rest = {key: value for key, value in content.items() if key != "model"}
    rest["training"] = rest["training"] | {"optimizer": {"state": {}, "param_groups": groups}}
    return rest, tensors


def joined(path: object, content: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of `parted`."""
    model = {n.removeprefix(MODEL): x for n, x in tensors.items() if n.startswith(MODEL)}
    content = content | {"model": model}
    if "training" not in content:
        return content
    try:
        optimizer = content["training"]["optimizer"]
        names = [name for group in optimizer["param_groups"] for name in group["params"]]
        number = {name: place for place, name in enumerate(names)}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, _, field = name.removeprefix(OPTIMIZER).rpartition(".")
                state.setdefault(number[parameter], {})[field] = tensor
        groups = [
            group | {"params": [number[name] for name in group["params"]]}
            for group in optimizer["param_groups"]
        ]
        content["training"] = content["training"] | {
            "optimizer": {"state": state, "param_groups": groups}
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the checkpoint lacks what resuming needs ({error!r})"
        ) from error
    return content


def read_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], group: Any = None
) -> None:
    """Fills tensors, or their shares on this rank, from a checkpoint folder.

    Args:
        group: the ranks that read together; None: this process alone.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        with warnings.catch_warnings():
            # torch warns that no_dist is used, which is intended here.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(
                tensors, storage_reader=Reader(path), process_group=group, no_dist=group is None
            )
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the checkpoint is cut short or damaged") from error
