"""torch's own attention: SDPA on padded sentences, and its varlen attention on packed ones.

``a`` has the operands of the op attention. ``left`` and ``right`` are the sides of the window, -1
for a side without end.
"""

import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.ops.packed import Gather, Scatter, places


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a scale above 0 that give the same scores. torch's attention masks the scores, or takes
    their maximum, before it scales them, which is wrong for a scale of 0 or below."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _every_head(x: Tensor, heads: int, dim: int) -> Tensor:
    """Keys or values with one head, a copy, for each of ``heads`` heads of queries."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def seen(queries: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """(..., M, N) bool: whether the key at position ``keys`` (..., N) is in the window of the query
    at ``queries`` (..., M). One side at least has an end."""
    after = keys.unsqueeze(-2) - queries.unsqueeze(-1)
    mask = after <= right if right >= 0 else after >= -left
    return mask & (after >= -left) if min(left, right) >= 0 else mask


def padded(q, k, v, mask, dropout_p: float, causal: bool, scale: float | None = None) -> Tensor:
    """Attention of q (B, H, S, d) to k and v (B, G, N, d); without a ``mask`` (B, 1, S, N) it may
    be causal."""
    if q.is_cuda and mask is not None:
        # Of torch's kernels for CUDA only the one that keeps all scores takes both.
        k, v = (_every_head(x, q.shape[1], 1) for x in (k, v))
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=grouped
    )


def _mask(a, dense: bool) -> Tensor | None:
    """The keys that padded queries see, (N or 1, 1, M or 1, S); None for all.

    dense: whether no key is padding. Padding may see anything.
    """
    same, device = a.cu_seqlens_q is a.cu_seqlens_k, a.q.device
    keys = torch.arange(a.max_seqlen_k, device=device)
    queries = torch.arange(a.max_seqlen_q, device=device)
    lengths, masks = a.cu_seqlens_k.diff(), []
    # A token that looks back from its own key does not reach the padding behind it.
    if not dense and not (same and a.right == 0):
        masks.append((keys < lengths[:, None])[:, None, None])
    if max(a.left, a.right) >= 0:
        if not same:
            queries = queries + (lengths - a.cu_seqlens_q.diff())[:, None]
        masks.append(seen(queries.view(-1, 1, a.max_seqlen_q), keys, a.left, a.right))
    return functools.reduce(torch.logical_and, masks) if masks else None


def sdpa(a) -> Tensor:
    """Attention on padded sentences, by torch's scaled_dot_product_attention."""
    q, scale = _positive_scale(a.q, a.scale)
    k, v, max_q, max_k = a.k, a.v, a.max_seqlen_q, a.max_seqlen_k
    count = a.cu_seqlens_q.shape[0] - 1
    if 0 in (count, max_q, max_k):
        # Zeros that depend on every operand, so that each operand gets a gradient.
        return q * 0 + 0 * (k.sum() + v.sum())
    dense = k.shape[0] == count * max_k

    def pad(x, cu_seqlens, length):
        if x.shape[0] != count * length:
            x = Scatter.apply(x, places(cu_seqlens, x.shape[0], length), count * length)
        return x.view(count, length, *x.shape[1:]).transpose(1, 2)

    causal = a.cu_seqlens_q is a.cu_seqlens_k and (a.left, a.right) == (-1, 0)
    mask = None if causal else _mask(a, dense)
    q_padded = pad(q, a.cu_seqlens_q, max_q)
    k, v = (pad(x, a.cu_seqlens_k, max_k) for x in (k, v))
    o = padded(q_padded, k, v, mask, a.dropout_p, causal, scale)
    if mask is not None:
        # A query without keys gives 0, and no gradient.
        o = torch.where(mask.any(-1, keepdim=True), o, 0)
    o = o.transpose(1, 2).flatten(0, 1)
    if q.shape[0] == count * max_q:
        return o
    return Gather.apply(o, places(a.cu_seqlens_q, q.shape[0], max_q))


@functools.cache
def _varlen_options(left: int, right: int) -> dict:
    """The arguments of torch's varlen_attn for a window; they depend on torch's version."""
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" in inspect.signature(varlen_attn).parameters:
        return {"window_size": (left, right)}
    if left >= 0 or right > 0:
        raise ValueError(
            f"attention: the varlen attention of torch {torch.__version__} has no window, got "
            f"({left}, {right})"
        )
    return {"is_causal": right == 0}


def varlen(a):
    """Attention on packed sentences, by torch's flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    q, scale = _positive_scale(a.q, a.scale)
    k, v, options = a.k, a.v, _varlen_options(a.left, a.right)
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options = options | {"enable_gqa": True}
        else:
            k, v = (_every_head(x, q.shape[1], 1) for x in (k, v))
    lengths = a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_q, a.max_seqlen_k
    return varlen_attn(q, k, v, *lengths, scale=scale, **options)
