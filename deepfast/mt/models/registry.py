"""The kinds of models that recipes and checkpoints name; what one must have is in `interface`."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from torch import nn

from deepfast.mt.models.depth_growing import DepthGrowing, DepthGrowingConfig
from deepfast.mt.models.fast_forward_lstm import FastForwardLSTM, FastForwardLSTMConfig
from deepfast.mt.models.transformer import Transformer
from deepfast.mt.models.transformer_config import TransformerConfig

DERIVED_FIELDS = ("vocab_size", "target_vocab_size", "padding_idx", "languages")
"""Fields of every config that the vocabulary decides, not the recipe."""


@dataclass(frozen=True)
class Kind:
    """One kind of model."""

    config: type
    """A ``kw_only`` dataclass with the `DERIVED_FIELDS`."""
    model: Callable[[Any], nn.Module]
    """Makes a module of a config."""

    @property
    def fields(self) -> dict[str, Any]:
        """Field -> type of the config."""
        hints = get_type_hints(self.config)
        return {field.name: hints[field.name] for field in fields(self.config)}


KINDS = {
    "transformer": Kind(TransformerConfig, Transformer),
    "depth_growing": Kind(DepthGrowingConfig, DepthGrowing),
    "fast_forward_lstm": Kind(FastForwardLSTMConfig, FastForwardLSTM),
}
"""Name in a recipe and in a checkpoint -> what it is."""


def kind_of(config: Any) -> str:
    """The name of the kind that a config belongs to.

    Raises:
        TypeError: for an object that is no config of `KINDS`.
    """
    for name, kind in KINDS.items():
        if type(config) is kind.config:
            return name
    known = ", ".join(kind.config.__name__ for kind in KINDS.values())
    raise TypeError(f"expected one of {known}, got {type(config).__name__}")


def build(config: Any) -> nn.Module:
    """The module of a config, initialised from torch's default generator."""
    return KINDS[kind_of(config)].model(config)
