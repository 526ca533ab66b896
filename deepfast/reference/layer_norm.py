"""Layer normalisation (Ba, Kiros, Hinton 2016), after dropout and a residual sum."""

import torch
from torch import Tensor

from deepfast.reference.dropout import dropout


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) * rstd, mean and rstd over the last dimension; biased variance, two passes.

    The mean of x - mean corrects the mean, so that a large mean or a constant x causes no rounding
    error (Chan, Golub, LeVeque 1983).
    """
    mean = x.mean(-1, keepdim=True)
    mean = mean + (x - mean).mean(-1, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``s = residual + dropout(x)``; returns ``(LN(s) * weight + bias, s)``, shaped like x."""
    s = x.to(compute_dtype(x.dtype))
    s = dropout(s.reshape(-1, s.shape[-1]), dropout_p, seed).view(s.shape)
    if residual is not None:
        s = s + residual.to(s.dtype)
    s = s.to(x.dtype)
    n, _, _ = normalise(s.to(compute_dtype(x.dtype)), eps)
    y = n if weight is None else n * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), s
