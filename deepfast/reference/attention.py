"""Scaled dot-product attention over packed sentences (Vaswani et al., Attention Is All You Need,
2017), as torch's varlen and FlashAttention define it.

Sentence i has the queries ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]`` and the keys
``cu_seqlens_k[i] : cu_seqlens_k[i + 1]``. T_q queries and T_k keys in all, H heads of width d, and
G heads of keys and values: head h of the queries reads head ``h // (H / G)`` (grouped-query
attention, Ainslie et al. 2023).

Of m queries and n keys, query i stands at key ``p = i + n - m``: the last query at the last key. It
sees the keys ``p - left <= j <= p + right``, where -1 is a side without end (a sliding window,
Beltagy et al. 2020). Causal attention has left -1 and right 0.
"""

from itertools import pairwise

import torch
from torch import Tensor

from deepfast.reference.dropout import Seed, dropout_mask
from deepfast.reference.rows import load, put


def sentences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The tokens of each sentence: those of its queries and those of its keys."""
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [(slice(*a), slice(*b)) for a, b in zip(pairwise(q), pairwise(k), strict=True)]


def grouped(x: Tensor, heads: int) -> Tensor:
    """The head (n, H, d) of keys or values (n, G, d) that each of H = ``heads`` heads reads."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def scores(q: Tensor, k: Tensor, left: int, right: int, scale: float) -> Tensor:
    """``scale q k^T`` (H, m, n) of one sentence, q (m, H, d), k (n, H, d); -inf where unseen."""
    s = scale * torch.einsum("mhd,nhd->hmn", q, k)
    m, n = s.shape[1:]
    queries = torch.arange(n - m, n, device=q.device)[:, None]
    after = torch.arange(n, device=q.device) - queries
    unseen = (after > (right if right >= 0 else n + m)) | (-after > (left if left >= 0 else n + m))
    return s.masked_fill(unseen, -torch.inf)


def weight_masks(seed: Seed, queries: int, heads: int, keys: int, p: float, like: Tensor) -> Tensor:
    """The factors (T_q, H, keys) that dropout multiplies the weights by.

    Row ``t H + h`` of the mask belongs to head h of query t; its channels are the keys of the
    query's sentence.
    """
    if p == 0:
        return like.new_ones(1, 1, 1).expand(queries, heads, keys)
    mask = dropout_mask(seed, queries * heads, keys, p, device=like.device)
    return mask.to(like.dtype).view(queries, heads, keys)


def attention(a) -> tuple[Tensor, Tensor]:
    """``o = dropout(softmax(scale q k^T)) v`` (T_q, H, d) and ``lse = log sum exp(scale q k^T)``
    (H, T_q) of the operands of attention_forward.

    q is (T_q, H, d), k and v are (T_k, G, d), G a divisor of H. cu_seqlens_q and cu_seqlens_k
    (N + 1,) int32 go from 0 to T_q and to T_k. A query that sees no key has ``o = 0`` and
    ``lse = -inf``.
    """
    rows = sentences(a.cu_seqlens_q, a.cu_seqlens_k)
    longest = max((keys.stop - keys.start for _, keys in rows), default=0)
    q, (count, heads) = load(a.q), a.q.shape[:2]
    k, v = grouped(load(a.k), heads), grouped(load(a.v), heads)
    masks = weight_masks(a.seed, count, heads, longest, a.dropout_p, q)
    o, lse = [q[:0]], [q.new_empty(heads, 0)]
    for queries, keys in rows:
        s = scores(q[queries], k[keys], a.left, a.right, a.scale)
        weights = s.softmax(-1).masked_fill(s == -torch.inf, 0)
        mask = masks[queries, :, : s.shape[2]].transpose(0, 1)
        o.append(torch.einsum("hmn,nhd->mhd", weights * mask, v[keys]))
        lse.append(s.logsumexp(-1))
    return torch.cat(o), torch.cat(lse, dim=1)


# ---- launches ------------------------------------------------------------------------------------


def attention_forward(a):
    o, lse = attention(a)
    put(a.o, o)
    put(a.lse, lse)


def attention_backward(a):
    """Gradients of attention_forward from that of ``o``."""
    heads, groups = a.q.shape[1], (a.k.shape[1], -1)
    masks = weight_masks(a.seed, a.q.shape[0], heads, a.max_seqlen_k, a.dropout_p, load(a.q))
    for rows, keys in sentences(a.cu_seqlens_q, a.cu_seqlens_k):
        q_a, g = load(a.q[rows]), load(a.dout[rows])
        k_b, v_b = grouped(load(a.k[keys]), heads), grouped(load(a.v[keys]), heads)
        s = scores(q_a, k_b, a.left, a.right, a.scale)
        weights = (s - a.lse[:, rows, None]).exp().masked_fill(s == -torch.inf, 0)
        mask = masks[rows, :, : s.shape[2]].transpose(0, 1)
        dweights = torch.einsum("mhd,nhd->hmn", g, v_b) * mask
        delta = (g * load(a.o[rows])).sum(-1).T
        ds = a.scale * weights * (dweights - delta.unsqueeze(-1))
        a.dq[rows] = torch.einsum("hmn,nhd->mhd", ds, k_b)
        a.dk[keys] = torch.einsum("hmn,mhd->nhd", ds, q_a).unflatten(1, groups).sum(2)
        a.dv[keys] = torch.einsum("hmn,mhd->nhd", weights * mask, g).unflatten(1, groups).sum(2)
