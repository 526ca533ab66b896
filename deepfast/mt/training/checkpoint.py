"""Checkpoints of a run: writing, reading, pruning, averaging, and comparing with a recipe.

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

Under torchrun a checkpoint to resume from is a folder, see `checkpoint_folder`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.files import replaced
from deepfast.mt.models import kind_of
from deepfast.mt.models.checkpoint import read_checkpoint, vocabulary_bytes
from deepfast.mt.models.checkpoint_file import FORMAT, VERSION
from deepfast.mt.models.transformer_config import without_unread
from deepfast.mt.training.errors import CheckpointError
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.report import METRICS

KEYS = {"step": int, "config": dict, "model": dict, "vocabulary": bytes, "recipe": dict}
"""Key -> type of its value."""
STEP_FILE = "step-{:08d}.pt"
BEST, AVERAGE = "best.pt", "average.pt"


def save_checkpoint(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a checkpoint. Even after a crash `path` is the old file or the whole new one.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    try:
        with replaced(path) as stream:
            torch.save({"format": FORMAT, "version": VERSION} | content, stream)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """The error that says why a checkpoint could not be written."""
    # After a failed write, torch's writer raises a RuntimeError when it closes.
    cause = error if isinstance(error, OSError) else error.__context__ or error
    reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
    kept = "; earlier ones are intact" if step_checkpoints(path.parent) else ""
    return CheckpointError(f"{path}: the checkpoint cannot be written ({reason}){kept}")


def load_checkpoint(path: str | os.PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
    """Read a checkpoint on the CPU. Its tensors are mapped: copy those that must outlive the file.

    Args:
        optimizer: False leaves the optimizer's state out where that takes less time.

    Raises:
        CheckpointError: missing, cut short, damaged, or not a checkpoint of this package.
    """
    try:
        content = read_checkpoint(path, optimizer=optimizer)
        if "vocabulary" in content:
            content["vocabulary"] = vocabulary_bytes(path, content["vocabulary"])
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    check_keys(content, path)
    name, step = Path(path).name.removesuffix(".pt"), content["step"]
    if re.fullmatch(r"step-\d{8}", name) and name != f"step-{step:08}":
        raise CheckpointError(f"{path}: expected a checkpoint of that step, got one of step {step}")
    return content


def check_keys(content: dict[str, Any], path: Any, keys: Iterable[str] = tuple(KEYS)) -> None:
    """Refuses a checkpoint without these keys, or with a value of another type."""
    missing = [key for key in keys if key not in content]
    if missing:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(missing)}")
    for key in keys:
        if not isinstance(content[key], KEYS[key]):
            got = type(content[key]).__name__
            raise CheckpointError(
                f"{path}: expected the checkpoint's {key} as {KEYS[key].__name__}, got {got}"
            )


def load_weights(model: torch.nn.Module, state: dict[str, Tensor], path: Any) -> None:
    """Load a state dict; the error says how it differs from the model."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_shapes(own, {name: tuple(tensor.shape) for name, tensor in state.items()}, path)
    model.load_state_dict(state)


def check_shapes(own: dict[str, tuple], found: dict[str, tuple], path: Any) -> None:
    """Refuse weights of other names or shapes than the model's."""
    for name, shape in own.items():
        if name not in found:
            raise CheckpointError(f"{path}: the checkpoint lacks the parameter {name}")
        if shape != found[name]:
            raise CheckpointError(
                f"{path}: the parameter {name} is {found[name]} in the checkpoint, expected {shape}"
            )
    unknown = [name for name in found if name not in own]
    if unknown:
        raise CheckpointError(f"{path}: the model has no parameter {unknown[0]}")


def check_config(path: Any, content: dict[str, Any], config: Any) -> None:
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


def step_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run by step, oldest first, without best and average."""
    # Only digits: a copy that the user named step-00001000-good.pt must not be pruned. A folder has
    # no suffix.
    digits = "[0-9]" * 8
    found = [*Path(folder).glob(f"step-{digits}.pt"), *Path(folder).glob(f"step-{digits}")]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def newest_checkpoints(folder: str | os.PathLike[str], count: int, every: int) -> list[Path]:
    """The last `count` checkpoints of those after every `every` steps and the newest.

    A checkpoint that an interrupted run wrote no longer counts once there is a later one. So a
    resumed run keeps and averages the same checkpoints as an uninterrupted one.
    """
    paths = step_checkpoints(folder)
    planned = [path for path in paths[:-1] if step_of(path) % every == 0]
    # A file and a folder may be of one step.
    by_step = {step_of(path): path for path in (*planned, *paths[-1:])}
    return [*by_step.values()][-count:]


def prune(folder: str | os.PathLike[str], keep: int, every: int = 1) -> None:
    """Remove checkpoints that neither resuming nor `newest_checkpoints` of `keep` will need."""
    paths = step_checkpoints(folder)
    planned = sorted({step for path in paths if (step := step_of(path)) % every == 0})
    for path in paths[:-1]:
        if step_of(path) not in planned[-keep:]:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Half a folder must not look like a checkpoint.
        path = path.rename(path.with_name(f".{path.name}.gone"))
        shutil.rmtree(path)
    else:
        path.unlink()


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step-"))


def recover(folder: Path) -> None:
    """Puts a checkpoint back that was moved aside by a run that ended before it put the new one in
    its place, and removes what was begun."""
    for old in folder.glob(".step-*.old"):
        path = old.with_name(old.name[1:].removesuffix(".old"))
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, path)
    # What ranks began is a folder, what one process began is a file.
    for part in (*folder.glob(".*.part"), *folder.glob(".step-*.gone")):
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
        # A run that failed before its first step leaves metrics without a line.
        ours = [file for file in ours if file.name != METRICS or file.stat().st_size]
        # Ranks that torchrun starts again before their first checkpoint find their own metrics.
        if present or (ours and not restarts()):
            # Without a checkpoint resume=true would begin anew.
            again = "continue it with resume=true, or " if present else ""
            raise CheckpointError(
                f"{folder}: expected a new folder, got one with an earlier run ({ours[0].name}): "
                f"{again}choose another with output=FOLDER"
            )
        return path
    # A copy may have any name.
    step = load_checkpoint(path, optimizer=False)["step"] if present else 0
    if present and step_of(present[-1]) > step:
        raise CheckpointError(
            f"{folder}: expected a folder without later checkpoints than {path}, got "
            f"{present[-1].name}: choose another with output=FOLDER"
        )
    return path


def intact_instead(folder: Path) -> str:
    """What to do where a run's newest checkpoint is damaged, as the end of a sentence that says so;
    empty where it is intact."""
    damaged: list[str] = []
    for path in (*reversed(step_checkpoints(folder)), *folder.glob(BEST)):
        try:
            resumable = "training" in load_checkpoint(path, optimizer=False)
        except CheckpointError:
            damaged.append(path.name)
            continue
        if resumable and damaged:
            return (
                f"; the newest intact one is {path}: move {', '.join(damaged)} out of the folder "
                f"and continue with resume={path}"
            )
        if resumable:
            return ""
    return "; no other one is intact" if damaged else ""


def average_checkpoints(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Tensor]:
    """The mean of the models' parameters, summed in float64 and returned in their own dtypes.

    Raises:
        CheckpointError: there are no paths, a file cannot be read, or the models differ in shape.
    """
    if not paths:
        raise CheckpointError("average: expected at least one checkpoint, got none")
    first = load_checkpoint(paths[0], optimizer=False)["model"]
    totals = {name: tensor.double() for name, tensor in first.items()}
    shapes = {name: tensor.shape for name, tensor in first.items()}
    for path in paths[1:]:
        state = load_checkpoint(path, optimizer=False)["model"]
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise CheckpointError(f"{path}: the model differs in shape from the one in {paths[0]}")
        for name, tensor in state.items():
            totals[name] += tensor
    return {name: (total / len(paths)).to(first[name].dtype) for name, total in totals.items()}


def sync_folder(folder: Path) -> None:
    """Makes the new file name survive a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
