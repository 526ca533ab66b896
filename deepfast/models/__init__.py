"""Whole models."""

from .transformer import Transformer, TransformerConfig, base, big

__all__ = ["Transformer", "TransformerConfig", "base", "big"]
