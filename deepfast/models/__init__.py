"""Whole models."""

from .fast_forward_lstm import FastForwardLSTM, FastForwardLSTMConfig
from .registry import KINDS, build, kind_of
from .transformer import Transformer, TransformerConfig, base, big

__all__ = [
    "KINDS",
    "FastForwardLSTM",
    "FastForwardLSTMConfig",
    "Transformer",
    "TransformerConfig",
    "base",
    "big",
    "build",
    "kind_of",
]
