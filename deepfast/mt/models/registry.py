"""The kinds of models, by the names that recipes and checkpoints use."""

from typing import Any

from deepfast.mt.models.depth_growing import DepthGrowing
from deepfast.mt.models.fast_forward_lstm import FastForwardLSTM
from deepfast.mt.models.interface import TranslationModel
from deepfast.mt.models.transformer import Transformer

KINDS: dict[str, type[TranslationModel]] = {
    "transformer": Transformer,
    "depth_growing": DepthGrowing,
    "fast_forward_lstm": FastForwardLSTM,
}
"""Name -> model."""

DERIVED_FIELDS = ("vocab_size", "target_vocab_size", "padding_idx", "languages")
"""Fields of a config that the vocabulary decides, not the recipe; an LSTM knows no languages."""


def kind_of(config: Any) -> str:
    """The name of the kind of model that a config describes.

    Raises:
        TypeError: for an object that is not a config of one of `KINDS`.
    """
    for name, model in KINDS.items():
        if type(config) is model.Config:
            return name
    known = ", ".join(model.Config.__name__ for model in KINDS.values())
    raise TypeError(f"expected one of {known}, got {type(config).__name__}")


def build(config: Any) -> TranslationModel:
    """The model of a config, initialised from torch's default generator."""
    return KINDS[kind_of(config)](config)
