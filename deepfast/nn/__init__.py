"""Modules: the depth connection, and Transformer layers and stacks around it."""

from .attention import KeyValueCache, MultiheadAttention
from .attention_residuals import AttentionResiduals, ResidualHistory
from .dlcl import DLCL
from .fusion import LayerFusion
from .history import DepthHistory
from .latent_depth import LatentDepth
from .layer_norm import LayerNorm
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .packing import Packing
from .transformer import DecoderCache, TransformerDecoder, TransformerEncoder
from .transparent_attention import TransparentAttention

__all__ = [
    "DLCL",
    "AttentionResiduals",
    "DecoderCache",
    "DepthHistory",
    "KeyValueCache",
    "LatentDepth",
    "LayerFusion",
    "LayerNorm",
    "MultiheadAttention",
    "Packing",
    "ResidualHistory",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TransparentAttention",
]
