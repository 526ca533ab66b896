"""Modules: the depth connection, and Transformer layers and stacks around it."""

from deepfast.depth.attention_residuals import AttentionResiduals
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory
from deepfast.nn.attention import MultiheadAttention
from deepfast.nn.cache import DecoderCache, Hypotheses, KeyValueCache
from deepfast.nn.connections.fusion import LayerFusion
from deepfast.nn.connections.latent import LatentDepth
from deepfast.nn.connections.transparent import TransparentAttention
from deepfast.nn.layer_norm import LayerNorm, RMSNorm
from deepfast.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from deepfast.nn.packing import Packing
from deepfast.nn.transformer import TransformerDecoder, TransformerEncoder

__all__ = [
    "DLCL",
    "AttentionResiduals",
    "DecoderCache",
    "DepthHistory",
    "Hypotheses",
    "KeyValueCache",
    "LatentDepth",
    "LayerFusion",
    "LayerNorm",
    "MultiheadAttention",
    "Packing",
    "RMSNorm",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TransparentAttention",
]
