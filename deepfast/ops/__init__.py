"""Fused ops with autograd, to drop into any training code.

Every op raises TypeError or ValueError for operands that do not fit, BackendError where the
requested backend (`deepfast.backend`) cannot run it, RuntimeError in backward for a second
derivative, and NotImplementedError under forward-mode differentiation (`torch.func.jvp`).
"""

from deepfast.ops.activation import activation
from deepfast.ops.attention import attention
from deepfast.ops.attention_residual import attention_residual
from deepfast.ops.depth_attention import depth_attention
from deepfast.ops.depth_mix import depth_mix
from deepfast.ops.feed_forward import feed_forward
from deepfast.ops.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from deepfast.ops.linear_cross_entropy import linear_cross_entropy
from deepfast.ops.norm_linear import add_norm_linear, norm_linear
from deepfast.ops.peephole_lstm import peephole_lstm

__all__ = [
    "activation",
    "add_layer_norm",
    "add_norm_linear",
    "add_rms_norm",
    "attention",
    "attention_residual",
    "depth_attention",
    "depth_mix",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "norm_linear",
    "peephole_lstm",
    "rms_norm",
]
