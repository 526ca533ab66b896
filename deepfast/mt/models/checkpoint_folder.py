"""The folder of a step, which any number of ranks writes and reads together.

    run.pt           the keys of a checkpoint file but its model, and
                         training   what else resuming needs, see `deepfast.mt.training.saving`
                         tensors    name -> dtype, shape and parts; a part is its offsets in the
                                    tensor, its sizes, its file, and the first byte and the number
                                    of bytes there
                         files      name -> check sum, of every other file
    __0_0.distcp     the tensors that rank 0 wrote, and so on

The tensors are ``model.NAME``, a parameter or a buffer, and ``optimizer.NAME.FIELD``, what the
optimizer keeps for a parameter. torch.distributed.checkpoint (DCP) writes and reads them.

DCP pickles its table of the parts, and a pickle can run code. Here the table is plain values in
run.pt. DCP's safetensors format has no pickle, but needs that package.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from deepfast.mt.models.checkpoint import PLAIN_KEYS, CheckpointError, read_run

MODEL, OPTIMIZER = "model.", "optimizer."

Table = dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple]]]
"""The values of the key `tensors`."""


class _Writer(dcp.FileSystemWriter):
    """Keeps where each part lies in the metadata that `dcp.save` returns, and writes no file of it.
    FileSystemWriter does so only since torch 2.13, with a pickled file."""

    def finish(self, metadata: Metadata, results: list) -> None:
        metadata.storage_data = {each.index: each.storage_data for rank in results for each in rank}


def write_tensors(path: Path, tensors: dict[str, Tensor], group: Any = None) -> Table:
    """Writes tensors, or this rank's shares of them, into a folder.

    Args:
        group: the ranks that write together; None: this process alone.

    Raises:
        CheckpointException: DCP could not write on some rank.
    """
    writer = _Writer(path)
    with _quiet():
        found = dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    table: Table = {}
    for name, entry in found.state_dict_metadata.items():
        parts = []
        for chunk in entry.chunks:
            place = found.storage_data[MetadataIndex(name, chunk.offsets)]
            where = place.relative_path, place.offset, place.length
            parts.append((tuple(chunk.offsets), tuple(chunk.sizes), *where))
        table[name] = entry.properties.dtype, tuple(entry.size), parts
    return table


class _Reader(dcp.FileSystemReader):
    """Takes the table of the parts in place of a pickled one."""

    def __init__(self, path: Path, table: Table):
        super().__init__(path)
        self.table = table

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for name, (dtype, shape, parts) in self.table.items():
            chunks = []
            for offsets, sizes, *place in parts:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(name, offsets)] = _StorageInfo(*place)
            properties = TensorProperties(dtype=dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        storage = StorageMeta(load_id=self.load_id)
        return Metadata(tensors, storage_data=places, storage_meta=storage)


def read_tensors(path: Path, table: Table, tensors: dict[str, Tensor], group: Any = None) -> None:
    """Fills tensors, or their shares on this rank, from a folder.

    Args:
        tensors: by their names in the table, which has all of them.
        group: the ranks that read together; None: this process alone.

    Raises:
        CheckpointError: the folder does not have them.
    """
    reader = _Reader(path, table)
    try:
        with _quiet():
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged or of another model") from error


def _quiet() -> Any:
    """Without torch's warning that a process works alone, which is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def read_folder(path: Path) -> dict[str, Any]:
    """The keys of `load_checkpoint` from a step's folder, without the optimizer's state.

    Raises:
        CheckpointError: see `read_run`.
    """
    content = read_run(path)
    check_files(path, content["files"])
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (dtype, shape, _) in content["tensors"].items()
        if name.startswith(MODEL)
    }
    read_tensors(path, content["tensors"], tensors)
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
    return {key: content[key] for key in PLAIN_KEYS} | {"model": model}


def check_sum(path: Path) -> str:
    """The BLAKE2b sum of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def check_files(path: Path, files: dict[str, str], rank: int = 0, size: int = 1) -> None:
    """Compares the files of a folder with their check sums.

    Args:
        rank, size: of several ranks each reads some of the files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name in sorted(files)[rank::size]:
        file = path / name
        if not file.is_file() or check_sum(file) != files[name]:
            raise CheckpointError(f"{path}: the checkpoint is damaged in its file {name}")
