"""Linear map to the vocabulary, then cross entropy with label smoothing (Szegedy et al. 2016)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.rows import load


def logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the logits of ``dtype``: fp32 for fp16, in which they could overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits ``hidden weight^T + bias``."""
    dtype = logits_dtype(hidden.dtype)
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def losses(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Losses and negative log-likelihoods (T,) of logits (T, V) in their own dtype; 0 if ignored.

        nll = -log p[target],  loss = (1 - smoothing) * nll + smoothing * mean_v(-log p[v])

    with p the softmax of the logits.
    """
    counts = target != ignore_index
    logp = F.log_softmax(logits, dim=-1)
    nll = -logp.gather(-1, target.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    loss = nll
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * nll - label_smoothing * logp.mean(-1)
    return loss.where(counts, 0.0), nll.where(counts, 0.0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Loss and nll of the logits ``hidden weight^T + bias``: of each target, summed or averaged.

    hidden (..., D), weight (V, D), bias (V,), target and token_weight (...), the factors of the
    targets. The mean is divided by the sum of the factors, 1 by default, of the targets that are
    not ignored; it is nan where that is 0.
    """
    logits = project(hidden, weight, bias).to(compute_dtype(hidden.dtype))
    factor = (target != ignore_index).to(logits.dtype)
    if token_weight is not None:
        factor = token_weight.to(logits.dtype).where(factor > 0, 0.0)
    rows = logits.reshape(-1, weight.shape[0]), target.reshape(-1)
    loss, nll = (factor * x.view_as(factor) for x in losses(*rows, label_smoothing, ignore_index))
    if reduction == "none":
        return loss, nll
    count = factor.sum() if reduction == "mean" else 1
    return loss.sum() / count, nll.sum() / count


# ---- launches ------------------------------------------------------------------------------------


def cross_entropy(a):
    """``loss`` and ``nll`` of each row; with ``write_grad`` the gradient overwrites the logits.

    logits (T, V), target (T,) int64, loss and nll (T,) in the compute dtype. The gradient is
    ``softmax - (1 - label_smoothing) * onehot - label_smoothing / V``, 0 where ignored.
    """
    x = load(a.logits)
    values = losses(x, a.target, a.label_smoothing, a.ignore_index)
    a.loss.copy_(values[0])
    a.nll.copy_(values[1])
    if a.write_grad:
        counts = (a.target != a.ignore_index).unsqueeze(-1)
        d = x.softmax(-1) - a.label_smoothing / x.shape[1]
        hit = a.target.unsqueeze(-1).where(counts, 0)
        d.scatter_add_(-1, hit, torch.full_like(d[:, :1], a.label_smoothing - 1))
        a.logits.copy_(d.where(counts, 0.0))
