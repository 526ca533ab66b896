"""A checkpoint of a run: writing, reading, averaging, and comparing with a recipe.

`deepfast.mt.models.checkpoint` reads the keys that a model needs; a run adds those that resuming
needs. The file is a torch file of plain values and tensors:

    format, version     of the file
    step                optimizer steps done
    kind                of the model, one of deepfast.mt.models.KINDS
    config              the fields of its config
    model               its state dict
    vocabulary          bytes of the sentencepiece model
    recipe              the recipe, as in its file
    training            what resuming needs; an average has none

Under torchrun a checkpoint to resume from is a folder, see `deepfast.mt.models.checkpoint_folder`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.files import replaced
from deepfast.mt.models import kind_of
from deepfast.mt.models.checkpoint import (
    FORMAT,
    MODEL_KEYS,
    VERSION,
    CheckpointError,
    check_keys,
    check_weights,
    read_checkpoint,
    shapes_of,
)
from deepfast.mt.models.transformer_config import without_unread

KEYS = MODEL_KEYS | {"step": int, "recipe": dict}
"""Keys of every checkpoint -> types of their values."""


def save_checkpoint(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a checkpoint. Even after a crash `path` is the old file or the whole new one.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    try:
        write_dict(Path(path), content)
    except (OSError, RuntimeError) as error:
        raise not_written(Path(path), error) from error


def write_dict(path: Path, content: dict[str, Any]) -> None:
    """Writes the file of a checkpoint, or the part without tensors of a folder, to the disk."""
    with replaced(path) as stream:
        torch.save({"format": FORMAT, "version": VERSION} | content, stream)
    sync_folder(path.parent)


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """The error that says why a checkpoint could not be written."""
    # After a failed write, torch's writer raises a RuntimeError when it closes.
    cause = error if isinstance(error, OSError) else error.__context__ or error
    reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
    kept = "; earlier ones are intact" if any(path.parent.glob("step-*")) else ""
    return CheckpointError(f"{path}: the checkpoint cannot be written ({reason}){kept}")


def load_checkpoint(path: str | os.PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
    """Read a checkpoint on the CPU. Its tensors are mapped: copy those that must outlive the file.

    Args:
        optimizer: False leaves the optimizer's state out where that takes less time.

    Raises:
        CheckpointError: missing, cut short, damaged, or not a checkpoint of this package.
    """
    content = read_checkpoint(path, optimizer=optimizer)
    check_keys(path, content, KEYS)
    name, step = Path(path).name.removesuffix(".pt"), content["step"]
    if re.fullmatch(r"step-\d{8}", name) and name != f"step-{step:08}":
        raise CheckpointError(f"{path}: expected a checkpoint of that step, got one of step {step}")
    return content


def load_weights(model: torch.nn.Module, state: dict[str, Tensor], path: object) -> None:
    """Load a state dict; the error says how it differs from the model."""
    check_weights(path, model, shapes_of(state))
    model.load_state_dict(state)


def check_config(path: object, content: dict[str, Any], config: Any) -> None:
    """Refuse a checkpoint of another kind of model or of other sizes; the error names them."""
    kind, saved = content.get("kind", "transformer"), content["config"]
    if kind != kind_of(config):
        raise CheckpointError(
            f"{path}: expected a checkpoint of the kind {kind_of(config)}, got {kind}"
        )
    mine = without_unread(asdict(config))
    # A field that is newer than the checkpoint had the meaning of its default.
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(config)
    }
    saved = without_unread(defaults | saved)
    # Another backend computes the same numbers.
    differences = [
        f"{name} {saved[name]!r} in the checkpoint and {value!r} in the recipe"
        for name, value in mine.items()
        if name != "backend" and saved[name] != value
    ]
    if differences:
        raise CheckpointError(
            f"{path}: the checkpoint is of another model: {', '.join(differences)}"
        )


def sync_folder(folder: Path) -> None:
    """Makes the new file name survive a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def average_checkpoints(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Tensor]:
    """The mean of the models' parameters, summed in float64 and returned in their own dtypes.

    Raises:
        CheckpointError: there are no paths, a file cannot be read, or the models differ in shape.
    """
    if not paths:
        raise CheckpointError("average: expected at least one checkpoint, got none")
    first = load_checkpoint(paths[0], optimizer=False)["model"]
    totals = {name: tensor.double() for name, tensor in first.items()}
    for path in paths[1:]:
        state = load_checkpoint(path, optimizer=False)["model"]
        if shapes_of(state) != shapes_of(first):
            raise CheckpointError(f"{path}: the model differs in shape from the one in {paths[0]}")
        for name, tensor in state.items():
            totals[name] += tensor
    return {name: (total / len(paths)).to(first[name].dtype) for name, total in totals.items()}
