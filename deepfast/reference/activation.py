"""The activation of a feed-forward block, followed by dropout: ``dropout(act(h + bias))``.

relu(h) = max(h, 0); gelu(h) = h Phi(h), with Phi the exact standard normal distribution, not its
tanh approximation (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).
"""

import math

import torch
from torch import Tensor

from deepfast.reference.dropout import Seed, dropout, dropout_scale
from deepfast.reference.rows import load, put

KINDS = ("relu", "gelu")


def _normal(x: Tensor) -> Tensor:
    """Phi(x) by erfc, because 1 + erf loses digits for negative x."""
    return 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def _sum(h: Tensor, bias: Tensor | None) -> Tensor:
    return load(h) if bias is None else load(h) + bias


def activation(
    h: Tensor, kind: str, *, bias: Tensor | None = None, dropout_p: float = 0.0, seed: Seed = None
) -> Tensor:
    """``dropout(act(h + bias))`` of h (..., F) and bias (F,), in h's dtype, rounded once.

    A NaN that is kept stays NaN.
    """
    x = _sum(h, bias)
    y = x.relu() if kind == "relu" else x * _normal(x)
    return dropout(y.reshape(-1, y.shape[-1]), dropout_p, seed).view(h.shape).to(h.dtype)


# ---- launches ------------------------------------------------------------------------------------


def activation_forward(a):
    """``out = dropout(act(h + bias))``; ``out`` may be ``h``."""
    a.out.copy_(activation(a.h, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed))


def activation_backward(a):
    """Gradients of activation_forward. ``saved`` is ``out`` for relu, which needs no bias, and
    ``h`` for gelu; ``dh`` may be ``dout`` or ``saved``. The bias gets the sum of dh over the rows.

    relu: ``dout * scale`` where the result is not 0, which shows both relu's and dropout's mask.
    gelu: ``dropout(dout * (Phi(x) + x phi(x)))``, x = h + bias, phi the density, the same mask.
    """
    g = load(a.dout)
    if a.kind == "relu":
        dh = torch.where(a.saved != 0, g * dropout_scale(a.dropout_p), 0)
    else:
        x = _sum(a.saved, a.bias)
        density = (x.square() * -0.5).exp() / math.sqrt(2 * math.pi)
        dh = dropout(g * (_normal(x) + x * density), a.dropout_p, a.seed)
    a.dh.copy_(dh)
    put(a.dbias, dh.sum(0))
