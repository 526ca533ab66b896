"""Fused ops with autograd, to drop into any training code."""

from . import _launches as _launches  # registers what torch is told of them
from .activation import activation
from .attention import attention
from .depth_attention import depth_attention
from .depth_mix import depth_mix
from .feed_forward import feed_forward
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .norm_linear import norm_linear
from .peephole_lstm import peephole_lstm

__all__ = [
    "activation",
    "attention",
    "depth_attention",
    "depth_mix",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "norm_linear",
    "peephole_lstm",
]
