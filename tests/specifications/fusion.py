"""Multi-layer representation fusion, term by term as in the paper.

Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, COLING 2018. The
states z_0 .. z_L of all layers, z_0 the embedding, become one vector for each token. The caller
applies the layer norm that follows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def average(z: Sequence[Tensor]) -> Tensor:
    """``1 / (L + 1) sum_l z_l``."""
    return sum(z) / len(z)


def feed_forward(parts: Sequence[Tensor], up, up_bias, down, down_bias) -> Tensor:
    """``W_2 max(0, W_1 [part; part; ...] + b_1) + b_2``, summed part by part.

    parts: (..., D) each. up: (F, parts * D). down: (D, F).
    """
    dim = parts[0].shape[-1]
    hidden = up_bias
    for index, part in enumerate(parts):
        hidden = hidden + part @ up[:, index * dim : (index + 1) * dim].T
    return hidden.clamp(min=0) @ down.T + down_bias


def attention_weights(
    z: Sequence[Tensor],
    embedding: Tensor,
    w1: Sequence[Tensor],
    w2: Tensor,
    nonlinear: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """``softmax_l(W_2 s(W_1 (z_l + E_l)))``: (..., hops) for each layer l.

    embedding: E, (L + 1, D). w1: a matrix (A, D) for each layer; they may be the same matrix. w2:
    (hops, A), or (D, A) for one weight per channel.
    """
    scores = [
        nonlinear((state + e) @ w.T) @ w2.T for state, e, w in zip(z, embedding, w1, strict=True)
    ]
    total = sum(s.exp() for s in scores)
    return [s.exp() / total for s in scores]


def attention(z: Sequence[Tensor], embedding: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """``sum_l a_lh (z_l + E_l)`` (..., D) for each hop h."""
    tilde = [state + e for state, e in zip(z, embedding, strict=True)]
    return [
        sum(a[..., h, None] * t for a, t in zip(weights, tilde, strict=True))
        for h in range(weights[0].shape[-1])
    ]


def channel_attention(z: Sequence[Tensor], embedding: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``sum_l a_l * (z_l + E_l)``, channel by channel. weights: (..., D) for each layer."""
    return torch.stack([a * (s + e) for a, s, e in zip(weights, z, embedding, strict=True)]).sum(0)
