"""A model from a checkpoint: a file or, from a run of several ranks, a folder.

A checkpoint is a dict, written by `torch.save`, that loads with ``weights_only=True``. A model
needs these keys:

    format       "deepfast-checkpoint"
    version      2
    kind         one of `deepfast.mt.models.KINDS`; "transformer" where it is absent
    config       the fields of that kind's config
    model        the model's state dict
    vocabulary   the sentencepiece model, or a dictionary of tokens, as bytes or as a uint8 tensor

Training adds further keys, which are not read here.
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.models import KINDS
from deepfast.mt.models.interface import TranslationModel
from deepfast.mt.models.transformer_config import without_unread

FORMAT = "deepfast-checkpoint"
VERSION = 2
BROKEN = (zipfile.BadZipFile, zlib.error, ValueError)
"""What reading a broken archive raises."""
MODEL_KEYS = {"config": dict, "model": dict, "vocabulary": bytes}
"""Keys that a model needs -> types of their values."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, written, or resumed."""


def read_checkpoint(path: str | os.PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
    """The dict of a checkpoint, a file or a folder, its format and version checked.

    Tensors are on the CPU and mapped from the file: unused ones are never read, and those that must
    outlive the file have to be copied. The vocabulary is bytes.

    Args:
        optimizer: False leaves the optimizer's state of a folder out.

    Raises:
        CheckpointError: the file does not exist, is damaged, is not a checkpoint, or is of another
            version.
    """
    path = Path(path)
    if path.is_dir():
        # DCP takes a second to import.
        from deepfast.mt.models.checkpoint_folder import read_folder

        content = read_folder(path, optimizer=optimizer)
    else:
        content = read_file(path)
    vocabulary = content.get("vocabulary", b"")
    if isinstance(vocabulary, Tensor) and vocabulary.dtype == torch.uint8:
        # Through a list: numpy is not a dependency, and the vocabulary is far below a megabyte.
        content["vocabulary"] = bytes(vocabulary.flatten().tolist())
    elif not isinstance(vocabulary, bytes):
        raise CheckpointError(
            f"{path}: expected the checkpoint's vocabulary as bytes or as a uint8 tensor, got "
            f"{vocabulary.dtype if isinstance(vocabulary, Tensor) else type(vocabulary).__name__}"
        )
    return content


def read_file(path: Path) -> dict[str, Any]:
    """`read_checkpoint` for a file. Compares its check sums, which torch.load does not do.

    Raises:
        CheckpointError: the file does not exist, is damaged, is not a checkpoint, or is of another
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
    if version != VERSION:
        raise CheckpointError(
            f"{path}: expected a checkpoint of version {VERSION}, got version {version!r}"
        )
    return content


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[TranslationModel, bytes]:
    """The model of a checkpoint, ready to translate, and its vocabulary.

    Args:
        path: the checkpoint.
        device: where to put the model.

    Returns:
        The model in evaluation mode, and the bytes of its vocabulary, for
        `deepfast.mt.data.read_vocabulary`. Its config has ``backend=None``: another machine may
        have trained it.

    Raises:
        ValueError: see `read_checkpoint`; or config, weights or vocabulary are missing or do not
            fit together.
    """
    content = read_checkpoint(path, optimizer=False)
    check_keys(path, content, MODEL_KEYS)
    model, weights = _described(path, content), content["model"]
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise CheckpointError(f"{path}: {name} must be a tensor of floating point, got {got}")
    check_weights(path, model, shapes_of(weights))
    copies = {name: weight.to(device, copy=True) for name, weight in weights.items()}
    model.load_state_dict(copies, assign=True)
    return model.eval(), content["vocabulary"]


def check_keys(path: object, content: dict[str, Any], keys: Mapping[str, type]) -> None:
    """Refuses a checkpoint without these keys, or with a value of another type."""
    missing = [key for key in keys if key not in content]
    if missing:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(missing)}")
    for key, expected in keys.items():
        if not isinstance(content[key], expected):
            raise CheckpointError(
                f"{path}: expected the checkpoint's {key} as {expected.__name__}, got "
                f"{type(content[key]).__name__}"
            )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_weights(
    path: object, model: torch.nn.Module, found: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses weights whose names or shapes are not those of the model; ``found`` has both."""
    expected = shapes_of(model.state_dict())
    for what, names in (
        ("lacks weights of", [name for name in expected if name not in found]),
        ("has weights that do not belong to", [name for name in found if name not in expected]),
    ):
        if names:
            raise CheckpointError(
                f"{path}: the checkpoint {what} the model that its config describes: {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    for name, shape in found.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{path}: the checkpoint's weights are not those of its config: {name} must be "
                f"{expected[name]}, got {shape}"
            )


def _described(path: str | os.PathLike[str], content: dict[str, Any]) -> TranslationModel:
    """The model that a checkpoint describes, on the meta device, for any backend."""
    kind, values = content.get("kind", "transformer"), content["config"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"{path}: expected a checkpoint of a kind of model that this deepfast knows "
            f"({', '.join(KINDS)}), got {kind!r}"
        )
    make = KINDS[kind].Config
    known = {field.name for field in fields(make)}
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise CheckpointError(
            f"{path}: the checkpoint's config has fields that this deepfast does not know: "
            f"{', '.join(unknown)}"
        )
    try:
        config = replace(make(**without_unread(values)), backend=None)
        # The weights are replaced; on the meta device they cost neither time nor memory.
        with torch.device("meta"):
            return KINDS[kind](config)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the checkpoint's config cannot be used ({error})"
        ) from error
