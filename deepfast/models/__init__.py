"""Whole models."""

from .depth_growing import DepthGrowing, DepthGrowingConfig
from .registry import KINDS, build, kind_of
from .transformer import Transformer
from .transformer_config import TransformerConfig, base, big

__all__ = [
    "KINDS",
    "DepthGrowing",
    "DepthGrowingConfig",
    "Transformer",
    "TransformerConfig",
    "base",
    "big",
    "build",
    "kind_of",
]
