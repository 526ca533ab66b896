"""Attention over depth: each token's softmax over the sources, and their weighted sum.

With given scores: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation,
COLING 2018. With a query against normalised sources: Kimi Team, Attention Residuals, 2026.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.layer_norm import rms_norm
from deepfast.reference.rows import load, put


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


# ---- launches ------------------------------------------------------------------------------------


def _scores(a):
    """The sources (K, T, D), the factors of their norms (K, T, 1), and the scores (T, K, H)."""
    v = torch.stack([load(x) for x in a.sources])
    r = torch.ones_like(v[..., :1])
    r = (v.square().mean(-1, keepdim=True) + a.eps).rsqrt() if a.norm else r
    return v, r, torch.einsum("ktd,hd->tkh", v * r, a.query) if a.scores is None else a.scores


def depth_attention_forward(a):
    """``out = sum_k softmax_k(s)_k v_k``, (T * H, D): row t * H + h has token t and hop h.

    Also, (T, H) each: ``most``, the largest score, ``total = sum_k exp(s_k - most)`` and
    ``lse = most + log(total)``. With a query (H, D), ``s_kh = query_h . v_k``, where ``norm``
    replaces v_k by RMSNorm(v_k). Without a query s is ``scores``. Where lse, most and total are
    None, the scores are the weights, without a softmax.
    """
    v, _, s = _scores(a)
    p = s if a.most is None else s.softmax(1)
    a.out.copy_(torch.einsum("tkh,ktd->thd", p, v).flatten(0, 1))
    if a.most is None:
        return
    a.lse.copy_(s.logsumexp(1))
    a.most.copy_(s.amax(1))
    a.total.copy_((s - a.most.unsqueeze(1)).exp().sum(1))


def depth_attention_backward(a):
    """Gradients of depth_attention_forward from ``dout`` and, unless it is None, ``dlse``.

    ``dsources`` is empty where no source needs one. Without a softmax out, most and total are None.
    """
    v, r, s = _scores(a)
    g = load(a.dout).unflatten(0, (s.shape[0], s.shape[2]))
    p, ds = s, torch.einsum("thd,ktd->tkh", g, v)
    if a.most is not None:
        delta = (g * load(a.out).unflatten(0, a.most.shape)).sum(-1)
        delta = delta if a.dlse is None else delta - a.dlse
        p = (s - a.most.unsqueeze(1)).exp() / a.total.unsqueeze(1)
        ds = p * (ds - delta.unsqueeze(1))
    put(a.dscores, ds)
    c = ds * r.transpose(0, 1)
    if a.dquery is not None:
        a.dquery.copy_(torch.einsum("tkh,ktd->hd", c, v))
    dv = torch.einsum("tkh,thd->ktd", p, g)
    dv = dv if a.query is None else dv + torch.einsum("tkh,hd->ktd", c, a.query)
    if a.norm:
        dv = dv - v * r.square() * (ds * s).sum(-1).T.unsqueeze(-1) / v.shape[-1]
    for target, d in zip(a.dsources, dv, strict=False):
        target.copy_(d)
