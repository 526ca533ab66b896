"""Whole models."""

from .registry import KINDS, build, kind_of
from .transformer import Transformer, TransformerConfig, base, big

__all__ = ["KINDS", "Transformer", "TransformerConfig", "base", "big", "build", "kind_of"]
