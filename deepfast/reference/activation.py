"""The activation of a feed-forward block with the dropout behind it, ``dropout(act(h))``.

relu(h) = max(h, 0); gelu(h) = h Phi(h), Phi the standard normal distribution, exact and not its
tanh form (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).
"""

import math

import torch
from torch import Tensor

from deepfast.reference.dropout import dropout, dropout_scale
from deepfast.reference.layer_norm import compute_dtype

KINDS = ("relu", "gelu")


def _normal(x: Tensor) -> Tensor:
    """Phi(x) by erfc: 1 + erf would cancel for negative x."""
    return 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def activation(
    h: Tensor, kind: str, *, dropout_p: float = 0.0, seed: int | Tensor | None = None
) -> Tensor:
    """``dropout(act(h))`` of (..., F) in h's dtype, rounded once. A NaN that is kept stays one."""
    x = h.to(compute_dtype(h.dtype))
    y = x.relu() if kind == "relu" else x * _normal(x)
    return dropout(y.reshape(-1, y.shape[-1]), dropout_p, seed).view(h.shape).to(h.dtype)


def activation_grad(
    dout: Tensor,
    saved: Tensor,
    kind: str,
    *,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """The gradient of h from that of `activation`; ``saved`` is relu's result, or gelu's h.

    relu: ``dout * scale`` where its result is not 0, which is the mask of both. gelu:
    ``dropout(dout * (Phi(h) + h phi(h)))``, the mask replayed from its seed, phi the density.
    """
    x, g = saved.to(compute_dtype(saved.dtype)), dout.to(compute_dtype(dout.dtype))
    if kind == "relu":
        dh = torch.where(x != 0, g * dropout_scale(dropout_p), 0)
    else:
        density = (x.square() * -0.5).exp() / math.sqrt(2 * math.pi)
        dh = g * (_normal(x) + x * density)
        dh = dropout(dh.reshape(-1, dh.shape[-1]), dropout_p, seed).view(dh.shape)
    return dh.to(dout.dtype)
