"""Multiway dynamic dense connections, as published.

Xiao, Meng, Li, Yuan, MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic
Dense Connections, ICML 2025, arXiv 2502.12170, Section 2.

y_0 is the embedding, y_l the output of layer l. Row l reads y_0 .. y_l and feeds layer l + 1: its
weights come from y_l itself, for each token and stream, of any sign. The streams are the inputs of
a layer's queries, keys and values, and its residual. The first layer reads y_0 alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.reference.layer_norm import rms_norm


def weights(y: Tensor, up: Tensor, down: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """``A = gelu(RMSNorm(y) W_1) W_2 + a``, (..., K, S).

    y: (..., D). up: W_1 as (H, D). down: W_2 as (K * S, H). bias: a (K, S).
    """
    n = rms_norm(y, eps=eps)[0]
    dynamic = F.gelu(n @ up.T) @ down.T
    return dynamic.unflatten(-1, bias.shape) + bias


def row(
    y: Sequence[Tensor], up: Tensor, down: Tensor, bias: Tensor, eps: float = 1e-6
) -> tuple[Tensor, ...]:
    """The S streams (..., D) of the row whose newest state is y[-1]: ``sum_k A[k, s] y_k``."""
    stack = torch.stack(list(y))
    mixed = torch.einsum("k...d,...ks->s...d", stack, weights(y[-1], up, down, bias, eps))
    return tuple(mixed)
