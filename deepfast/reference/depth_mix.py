"""Depth mixing: the weighted sum over layers behind DLCL.

Wang et al., Learning Deep Transformer Models for Machine Translation, ACL 2019, Eq. 7 to 9.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.layer_norm import normalise
from deepfast.reference.rows import affine, entry, load, norm_backward, normalised


def depth_mix(
    sources: Sequence[Tensor], weight: Tensor, *, norm_weight=None, norm_bias=None, eps=1e-5
) -> Tensor:
    """``sum_k weight[k] * LN_k(sources[k])``; without norm_weight and norm_bias, no LN.

    sources: K tensors (..., D). weight: (K,) or (K, D); or (..., K, S) for S sums (..., S, D), as
    `depth_mix_sums` expands its (K, S), without norms. norm_weight, norm_bias: (K, D).
    """
    dtype = sources[0].dtype
    if weight.dim() == sources[0].dim() + 1:
        stack = torch.stack([source.to(compute_dtype(dtype)) for source in sources], -2)
        return (weight.mT.to(stack.dtype) @ stack).to(dtype)
    total = None
    for k, source in enumerate(sources):
        z = source.to(compute_dtype(dtype))
        if norm_weight is not None or norm_bias is not None:
            z, _, _ = normalise(z, eps)
            z = z if norm_weight is None else z * norm_weight[k]
            z = z if norm_bias is None else z + norm_bias[k]
        term = weight[k] * z
        total = term if total is None else total + term
    return total.to(dtype)


def dlcl(
    y: Sequence[Tensor],
    row: int,
    weight: Tensor,
    *,
    norm: str | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    normalize_embedding: bool = False,
    eps: float = 1e-5,
    rms: bool = False,
) -> Tensor:
    """The input of layer ``row`` from y_0 .. y_row, exactly as in the paper.

    pre-norm   x = sum_k W[row, k] * LN_k(y_k)
    post-norm  x = LN_row(sum_k W[row, k] * y_k)

    weight: (L+1, L+1) or (L+1, L+1, D), already masked. norm_weight, norm_bias: (L+1, D).
    Index 0 has no LN unless ``normalize_embedding``. With ``rms`` LN is an RMS norm, without bias.
    """

    def layer_norm(x: Tensor, k: int) -> Tensor:
        if k == 0 and not normalize_embedding:
            return x
        n = normalise(x, eps, rms)[0] * norm_weight[k]
        return n if norm_bias is None else n + norm_bias[k]

    z = [layer_norm(y[k], k) if norm == "pre" else y[k] for k in range(row + 1)]
    x = sum(weight[row, k] * z[k] for k in range(row + 1))
    return layer_norm(x, row) if norm == "post" else x


# ---- launches ------------------------------------------------------------------------------------


def depth_mix_forward(a):
    """``out = sum_k weight[k] * LN_k(sources[k])`` over separate tensors."""
    total = 0
    for k, source in enumerate(a.sources):
        n = load(source)
        if a.norm:
            n, a.mean[k], a.rstd[k] = normalise(n, a.eps)
        z = affine(n, entry(a.norm_weight, k), entry(a.norm_bias, k))
        total = total + a.weight[k] * z
    a.out.copy_(total)


def depth_mix_backward(a):
    """Gradients of depth_mix_forward; ``dsources`` is empty where no source needs one."""
    g = load(a.dout)
    for k, source in enumerate(a.sources):
        n = load(source)
        if a.norm:
            n = normalised(n, a.mean[k], a.rstd[k])
        z = affine(n, entry(a.norm_weight, k), entry(a.norm_bias, k))
        u = a.weight[k] * g
        if a.dweight is not None:
            a.dweight[k] = (g * z).sum(0) if a.weight.dim() == 2 else (g * z).sum()
        if a.dnorm_weight is not None:
            a.dnorm_weight[k] = (u * n).sum(0)
        if a.dnorm_bias is not None:
            a.dnorm_bias[k] = u.sum(0)
        if a.dsources:
            u = u if a.norm_weight is None else u * a.norm_weight[k]
            a.dsources[k].copy_(norm_backward(u, n, a.rstd[k]) if a.norm else u)
