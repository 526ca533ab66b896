"""Whole models."""

from deepfast.mt.models.depth_growing import DepthGrowing, DepthGrowingConfig
from deepfast.mt.models.fast_forward_lstm import FastForwardLSTM, FastForwardLSTMConfig
from deepfast.mt.models.registry import KINDS, build, kind_of
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
    "base",
    "big",
    "build",
    "kind_of",
]
