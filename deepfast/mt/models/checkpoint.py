"""A model from a checkpoint: a file or, from a run of several ranks, a folder.

A checkpoint is a dict, written by `torch.save`, that loads with ``weights_only=True``. A model
needs these keys:

    format       "deepfast-checkpoint"
    version      1
    kind         one of `deepfast.mt.models.KINDS`; "transformer" where it is absent
    config       the fields of that kind's config
    model        the model's state dict
    vocabulary   the sentencepiece model, or a dictionary of tokens, as bytes or as a uint8 tensor

Training adds further keys, which are not read here.
"""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.models.checkpoint_file import read_file
from deepfast.mt.models.interface import TranslationModel
from deepfast.mt.models.registry import KINDS
from deepfast.mt.models.transformer_config import without_unread


def read_checkpoint(path: str | os.PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
    """The dict of a checkpoint, a file or a folder, its format and version checked.

    Tensors are on the CPU and mapped from the file: unused ones are never read, and those that must
    outlive the file have to be copied.

    Args:
        optimizer: False leaves the optimizer's state of a folder out.

    Raises:
        ValueError: the file does not exist, is damaged, is no checkpoint, or is of a newer version.
    """
    path = Path(path)
    if path.is_dir():
        # DCP takes a second to import.
        from deepfast.mt.models.checkpoint_folder import read_folder

        return read_folder(path, optimizer=optimizer)
    return read_file(path)


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
    missing = [key for key in ("config", "model", "vocabulary") if key not in content]
    if missing:
        raise ValueError(f"{path}: the checkpoint lacks {', '.join(missing)}")
    vocabulary = vocabulary_bytes(path, content["vocabulary"])
    kind = content.get("kind", "transformer")
    model = _described(path, kind, content["config"])
    _check_weights(path, model.state_dict(), content["model"])
    weights = {name: weight.to(device, copy=True) for name, weight in content["model"].items()}
    model.load_state_dict(weights, assign=True)
    return model.eval(), vocabulary


def vocabulary_bytes(path: str | os.PathLike[str], vocabulary: object) -> bytes:
    """The bytes of a checkpoint's vocabulary."""
    if isinstance(vocabulary, Tensor) and vocabulary.dtype == torch.uint8:
        # Through a list: numpy is not a dependency, and the vocabulary is far below a megabyte.
        return bytes(vocabulary.flatten().tolist())
    if isinstance(vocabulary, bytes):
        return vocabulary
    raise ValueError(
        f"{path}: expected the checkpoint's vocabulary as bytes or as a uint8 tensor, got "
        f"{vocabulary.dtype if isinstance(vocabulary, Tensor) else type(vocabulary).__name__}"
    )


def _described(path: str | os.PathLike[str], kind: object, values: object) -> TranslationModel:
    """The model of a kind and a config, on the meta device."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"{path}: expected a checkpoint of a kind of model that this deepfast knows "
            f"({', '.join(KINDS)}), got {kind!r}"
        )
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: expected the checkpoint's config as a dict, got {type(values).__name__}"
        )
    make = KINDS[kind].Config
    known = {field.name for field in fields(make)}
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"{path}: the checkpoint's config has fields that this deepfast does not know: "
            f"{', '.join(unknown)}"
        )
    try:
        config = replace(make(**without_unread(values)), backend=None)
        # The weights are replaced; on the meta device they cost neither time nor memory.
        with torch.device("meta"):
            return KINDS[kind](config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: the checkpoint's config cannot be used ({error})") from error


def _check_weights(
    path: str | os.PathLike[str], expected: dict[str, Tensor], weights: object
) -> None:
    if not isinstance(weights, dict):
        raise ValueError(
            f"{path}: expected the checkpoint's weights as a dict, got {type(weights).__name__}"
        )
    for what, names in (
        ("lacks weights of", [name for name in expected if name not in weights]),
        ("has weights that do not belong to", [name for name in weights if name not in expected]),
    ):
        if names:
            raise ValueError(
                f"{path}: the checkpoint {what} the model that its config describes: {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    for name, weight in weights.items():
        shape = tuple(expected[name].shape)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"{path}: {name} must be a tensor of floating point, got {got}")
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"{path}: the checkpoint's weights are not those of its config: {name} must be "
                f"{shape}, got {tuple(weight.shape)}"
            )
