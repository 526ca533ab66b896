"""Transparent attention: each decoder layer attends to its own mixture of all encoder layers.

Bapna et al., Training Deeper Neural Machine Translation Models with Transparent Attention, EMNLP
2018, https://aclanthology.org/D18-1338.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def transparent_attention(
    states: Sequence[Tensor], weight: Tensor, *, norm_weight=None, norm_bias=None, eps=1e-5
) -> list[Tensor]:
    """``z_j = sum_k softmax(weight[j])[k] * h_k`` for each decoder layer j.

    h_k is state k, or LN_k of it in pre-norm, where states are sums that no norm has seen.

    states: the embedding and the outputs of L encoder layers, (..., D) each. weight: (M, L+1).
    norm_weight, norm_bias: (L+1, D), or None for no LN.
    """
    if norm_weight is not None:
        norms = zip(states, norm_weight, norm_bias, strict=True)
        states = [F.layer_norm(h, h.shape[-1:], gain, shift, eps) for h, gain, shift in norms]
    shares = weight.softmax(1)
    return [sum(p * h for p, h in zip(row, states, strict=True)) for row in shares]
