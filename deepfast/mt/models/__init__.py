"""Whole translation models.

    from deepfast.mt.models import Transformer, base
    model = Transformer(base(vocab_size=8000, encoder_layers=30))
    loss, nll = model.loss(source, target_in, target_out)

Begin with `transformer`: the encoder-decoder model, read from top to bottom. `transformer_config`
holds its sizes and choices, `interface` what training and search ask of any model. `depth_growing`
and `fast_forward_lstm` are the other kinds. `checkpoint` reads a saved model, `prune` removes the
layers that latent depth does not use.
"""

from typing import Any

from deepfast.mt.models.depth_growing import DepthGrowing, DepthGrowingConfig
from deepfast.mt.models.fast_forward_lstm import FastForwardLSTM, FastForwardLSTMConfig
from deepfast.mt.models.interface import TranslationModel
from deepfast.mt.models.transformer import Transformer
from deepfast.mt.models.transformer_config import TransformerConfig, base, big

__all__ = [
    "KINDS",
    "DepthGrowing",
    "DepthGrowingConfig",
    "FastForwardLSTM",
    "FastForwardLSTMConfig",
    "Transformer",
    "TransformerConfig",
    "TranslationModel",
    "base",
    "big",
    "build",
    "kind_of",
]

KINDS: dict[str, type[TranslationModel]] = {
    "transformer": Transformer,
    "depth_growing": DepthGrowing,
    "fast_forward_lstm": FastForwardLSTM,
}
"""Name -> model."""


def kind_of(config: Any) -> str:
    """The name of the kind of model that a config describes."""
    return next(name for name, model in KINDS.items() if type(config) is model.Config)


def build(config: Any) -> TranslationModel:
    """The model of a config, initialised from torch's default generator."""
    return KINDS[kind_of(config)](config)
