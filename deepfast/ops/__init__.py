"""Fused ops with autograd, to drop into any training code."""

from .depth_mix import depth_mix
from .layer_norm import layer_norm

__all__ = ["depth_mix", "layer_norm"]
