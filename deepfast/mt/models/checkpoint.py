"""A checkpoint to translate with: one file, which `torch.save` writes and a rename replaces.

It is read with ``weights_only=True``, so reading it runs no code. Its keys:

    format       "deepfast-checkpoint"
    version      3
    step         optimizer steps done
    kind         one of `deepfast.mt.models.KINDS`
    config       the fields of that kind's config
    model        the model's state dict
    vocabulary   the bytes of the vocabulary, for `Vocabulary.from_bytes`
    recipe       the recipe, as in its file

A step that a run resumes from is a folder, see `deepfast.mt.models.checkpoint_folder`. The readers
here read its model too.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.files import replaced, sync
from deepfast.mt.models import KINDS, kind_of
from deepfast.mt.models.interface import TranslationModel

FORMAT = "deepfast-checkpoint"
VERSION = 3
PLAIN_KEYS = ("step", "kind", "config", "vocabulary", "recipe")
"""Keys of every checkpoint, without the tensors."""
RUN = "run.pt"
"""The file of these keys in the folder of a step."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, written, or resumed."""


def save_checkpoint(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes a checkpoint file. Even after a crash `path` is the old file or the whole new one.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    try:
        with replaced(path) as stream:
            torch.save({"format": FORMAT, "version": VERSION} | content, stream)
        sync(path.parent)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """The error that says why a checkpoint could not be written."""
    # After a failed write, torch's writer raises a RuntimeError when it closes.
    cause = error if isinstance(error, OSError) else error.__context__ or error
    reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
    kept = "; earlier ones are intact" if any(path.parent.glob("step-*")) else ""
    return CheckpointError(f"{path}: the checkpoint cannot be written ({reason}){kept}")


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a checkpoint, a file or the folder of a step, with the model on the CPU.

    Tensors of a file are mapped: copy those that must outlive it.

    Raises:
        CheckpointError: missing, cut short, damaged, of another version, or no checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / RUN).exists():
            raise CheckpointError(
                f"{path}: expected a checkpoint, such as {path / 'best.pt'}, got a folder that is "
                "no step of a run"
            )
        # torch.distributed.checkpoint takes a second to import.
        from deepfast.mt.models.checkpoint_folder import read_folder

        return read_folder(path)
    content = _read_file(path)
    if "model" not in content:
        raise CheckpointError(
            f"{path}: expected a checkpoint with its tensors, got {RUN} of a step"
        )
    return content


def read_run(path: Path) -> dict[str, Any]:
    """The keys of the folder of a step, without its tensors.

    Raises:
        CheckpointError: it cannot be read.
    """
    return _read_file(path / RUN)


def _read_file(path: Path) -> dict[str, Any]:
    """The dict of a file that `save_checkpoint` wrote. Compares check sums, unlike torch.load.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    # Opening a pipe would wait for a writer.
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: expected a deepfast checkpoint, got no regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(damaged)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    # Damaged data can raise anything.
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected a deepfast checkpoint, got a file of another kind, or one that is "
            "cut short or damaged"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: expected a deepfast checkpoint, got other torch.save content"
        )
    if content["version"] != VERSION:
        raise CheckpointError(
            f"{path}: expected a checkpoint of version {VERSION}, got version {content['version']}"
        )
    return content


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[TranslationModel, bytes]:
    """The model of a checkpoint, ready to translate, and the bytes of its vocabulary.

    Raises:
        CheckpointError: see `load_checkpoint` and `model_of`.
    """
    content = load_checkpoint(path)
    return model_of(path, content, device), content["vocabulary"]


def model_of(
    path: object, content: dict[str, Any], device: torch.device | str = "cpu"
) -> TranslationModel:
    """The model that a checkpoint holds, in evaluation mode.

    Args:
        path: its name in errors.
        content: of `load_checkpoint`. Its tensors are copied.
        device: where to put the model.

    Returns:
        The model. Its config has ``backend=None``: another machine may have trained it.

    Raises:
        CheckpointError: kind, config or weights do not fit together.
    """
    try:
        kind = KINDS[content["kind"]]
        # The weights are replaced; on the meta device they cost neither time nor memory.
        with torch.device("meta"):
            model = kind(replace(kind.Config(**content["config"]), backend=None))
        copies = {name: weight.to(device, copy=True) for name, weight in content["model"].items()}
        model.load_state_dict(copies, assign=True)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: the checkpoint's kind, config and weights do not go together ({reason:.200})"
        ) from error
    return model.eval()


def check_config(path: object, content: dict[str, Any], config: Any) -> None:
    """Refuses a checkpoint of another kind of model or of other sizes; the error names them."""
    kind, saved = content["kind"], content["config"]
    if kind != kind_of(config):
        raise CheckpointError(
            f"{path}: expected a checkpoint of the kind {kind_of(config)}, got {kind}"
        )
    # Another backend computes the same numbers.
    differences = [
        f"{name} {saved.get(name)!r} in the checkpoint and {value!r} in the recipe"
        for name, value in asdict(config).items()
        if name != "backend" and saved.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"{path}: the checkpoint is of another model: {', '.join(differences)}"
        )


def average_checkpoints(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Tensor]:
    """The mean of the models' parameters, summed in float64 and returned in their own dtypes.

    Raises:
        CheckpointError: one cannot be read, or the models differ in shape.
    """
    first = load_checkpoint(paths[0])["model"]
    totals = {name: tensor.double() for name, tensor in first.items()}
    for path in paths[1:]:
        weights = load_checkpoint(path)["model"]
        if _shapes(weights) != _shapes(first):
            raise CheckpointError(f"{path}: the model differs in shape from the one in {paths[0]}")
        for name, tensor in weights.items():
            totals[name] += tensor
    return {name: (total / len(paths)).to(first[name].dtype) for name, total in totals.items()}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
