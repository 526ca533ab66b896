"""Checkpoints that all ranks write and read together; `deepfast.mt.models.checkpoint_folder` has
their format."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from deepfast.mt.models.checkpoint import check_weights
from deepfast.mt.models.checkpoint_folder import (
    METADATA,
    MODEL,
    OPTIMIZER,
    RUN,
    check_files,
    check_sum,
    joined,
    read_tensors,
    shapes,
)
from deepfast.mt.training.checkpoint import not_written, sync_folder, write_dict
from deepfast.mt.training.errors import ToldError
from deepfast.mt.training.ranks import Ranks


def save_folder(
    path: Path, content: dict[str, Any], tensors: dict[str, Tensor], ranks: Ranks
) -> None:
    """Write a checkpoint from all ranks. Even after a crash `path` is the old one or the new one.

    Args:
        content: the keys without tensors; that of the first rank counts.
        tensors: of this rank, whole or shares.

    Raises:
        CheckpointError: this rank cannot write, or the first cannot finish.
        ToldError: another rank cannot write, and says so.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        ranks.by_first(lambda: _begin(temporary))
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), process_group=ranks.slow)
        mine = {file.name: check_sum(file) for file in temporary.glob(f"__{ranks.rank}_*.distcp")}
        files = {name: total for each in ranks.objects(mine) for name, total in each.items()}
        ranks.by_first(lambda: _finish(temporary, path, content, files))
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        if isinstance(error, (ToldError, dist.DistError)):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        cause: BaseException = error
        if isinstance(error, dcp.api.CheckpointException):
            if ranks.rank not in error.failures:
                raise ToldError(str(path)) from error
            cause = error.failures[ranks.rank][0]
        raise not_written(path, cause) from error


def _begin(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _finish(temporary: Path, path: Path, content: dict[str, Any], files: dict[str, int]) -> None:
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
