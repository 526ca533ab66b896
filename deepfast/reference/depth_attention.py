"""Attention over depth: each token's softmax over the sources, and their weighted sum.

With given scores: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation,
COLING 2018. With a query against normalised sources: Kimi Team, Attention Residuals, 2026.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.layer_norm import rms_norm


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    norm: str | None = "rms",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """``out_h = sum_k softmax_k(s_kh) v_k`` and ``lse_h = log sum_k exp(s_kh)`` over K sources v_k.

    sources: K tensors (..., D). query: (D,) or (H, D), for ``s_kh = query_h . RMSNorm(v_k)`` with
    norm_weight (D,), (H, D) or None, or without the norm. scores: s itself, (..., K) or
    (..., K, H). out: (..., D) or (..., H, D). lse: (...) or (..., H).
    """
    v = torch.stack([x.to(compute_dtype(x.dtype)) for x in sources], -2)
    one_hop = query.dim() == 1 if scores is None else scores.dim() == sources[0].dim()
    if scores is None:
        q = query if norm_weight is None else query * norm_weight
        n = v if norm is None else rms_norm(v, eps=eps)[0]
        s = torch.einsum("...kd,hd->...kh", n, q.view(-1, q.shape[-1]).to(v.dtype))
    else:
        s = (scores.unsqueeze(-1) if one_hop else scores).to(v.dtype)
    out = torch.einsum("...kh,...kd->...hd", s.softmax(-2), v).to(sources[0].dtype)
    lse = s.logsumexp(-2)
    return (out.squeeze(-2), lse.squeeze(-1)) if one_hop else (out, lse)
