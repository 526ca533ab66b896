"""Whole models."""

from .depth_growing import DepthGrowing, DepthGrowingConfig
from .fast_forward_lstm import FastForwardLSTM, FastForwardLSTMConfig
from .registry import KINDS, build, kind_of
from .transformer import Transformer
from .transformer_config import TransformerConfig, base, big

__all__ = [
    "KINDS",
    "DepthGrowing",
    "DepthGrowingConfig",
    "FastForwardLSTM",
    "FastForwardLSTMConfig",
    "Transformer",
    "TransformerConfig",
    "base",
    "big",
    "build",
    "kind_of",
]
