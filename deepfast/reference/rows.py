"""Helpers of the launches: rows in the dtype of the arithmetic, and their norms."""

from torch import Tensor

from deepfast.dtypes import compute_dtype


def load(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x.dtype))


def affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


def normalised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (x if mean is None else x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def norm_backward(dn: Tensor, n: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    a = 0 if rms else dn.mean(-1, keepdim=True)
    return rstd.unsqueeze(-1) * (dn - a - n * (dn * n).mean(-1, keepdim=True))


def put(target: Tensor | None, value: Tensor) -> None:
    if target is not None:
        target.copy_(value)


def entry(parameter: Tensor | None, k: int) -> Tensor | None:
    return None if parameter is None else parameter[k]
