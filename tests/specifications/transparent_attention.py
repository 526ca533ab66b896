"""Transparent attention: each decoder layer attends to its own mixture of all encoder layers.

Bapna et al., Training Deeper Neural Machine Translation Models with Transparent Attention, EMNLP
2018, https://aclanthology.org/D18-1338.
"""

from collections.abc import Sequence

from torch import Tensor

from deepfast.reference.layer_norm import normalise


def transparent_attention(
    states: Sequence[Tensor],
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> list[Tensor]:
    """``z_j = sum_k softmax(weight[j])[k] * h_k`` for each decoder layer j.

    h_k is state k, or LN_k of it in pre-norm, where states are sums that no norm has seen.

    states: the embedding and the outputs of L encoder layers, (..., D) each. weight: (M, L+1).
    norm_weight, norm_bias: (L+1, D), or None for no LN.
    """
    mixtures = []
    for logits in weight:
        share = logits.softmax(0)
        total = 0.0
        for k, state in enumerate(states):
            h = state
            if norm_weight is not None:
                h = normalise(state, eps)[0] * norm_weight[k] + norm_bias[k]
            total = total + share[k] * h
        mixtures.append(total)
    return mixtures
