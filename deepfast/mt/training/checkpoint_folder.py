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

from deepfast.mt.models.checkpoint_file import FORMAT, VERSION
from deepfast.mt.models.checkpoint_folder import (
    METADATA,
    MODEL,
    OPTIMIZER,
    RUN,
    check_files,
    check_sum,
    read_tensors,
    shapes,
)
from deepfast.mt.training.checkpoint import check_shapes, not_written, sync_folder
from deepfast.mt.training.errors import CheckpointError, ToldError
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
    with open(temporary / RUN, "wb") as stream:
        torch.save({"format": FORMAT, "version": VERSION, "files": files} | content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(temporary)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a checkpoint: those of the model and of the optimizer."""
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        for field, value in optimizer.state.get(p, {}).items():
            tensors[f"{OPTIMIZER}{name}.{field}"] = value
    return tensors


def optimizer_options(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer without tensors, and with the names of its parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [
        group | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": {}, "param_groups": groups}


def load_folder(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    files: dict[str, int],
) -> None:
    """Fills model and optimizer with this rank's share of a checkpoint; all ranks call it.

    Args:
        files: the check sums of its files.
    """
    found = shapes(path)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    check_shapes(
        {name.removeprefix(MODEL): tuple(tensor.shape) for name, tensor in tensors.items()},
        {n.removeprefix(MODEL): tuple(s.size) for n, s in found.items() if n.startswith(MODEL)},
        path,
    )
    states = {}
    for name, p in model.named_parameters():
        prefix = f"{OPTIMIZER}{name}."
        state = {
            key.removeprefix(prefix): torch.zeros_like(p) if shape.size else _step(p)
            for key, shape in found.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        if state:
            states[p] = state
            tensors |= {f"{prefix}{field}": value for field, value in state.items()}
    try:
        check_files(path, files, ranks.rank, ranks.size)
        read_tensors(path, tensors, ranks.slow)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for p, state in states.items():
        optimizer.state[p] = state


def _step(p: Tensor) -> Tensor:
    """Where the fused Adam counts its steps."""
    return torch.zeros((), device=p.device)
