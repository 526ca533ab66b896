"""The activation of a feed-forward block, followed by dropout: ``dropout(act(h + bias))``.

relu(h) = max(h, 0); gelu(h) = h Phi(h), with Phi the exact standard normal distribution, not its
tanh approximation (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).
"""

import math

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.dropout import dropout, dropout_scale
from deepfast.reference.rows import put

KINDS = ("relu", "gelu")


def _normal(x: Tensor) -> Tensor:
    """Phi(x) by erfc, because 1 + erf loses digits for negative x."""
    return 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def _sum(h: Tensor, bias: Tensor | None) -> Tensor:
    x = h.to(compute_dtype(h.dtype))
    return x if bias is None else x + bias


def activation(
    h: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """``dropout(act(h + bias))`` of h (..., F) and bias (F,), in h's dtype, rounded once.

    A NaN that is kept stays NaN.
    """
    x = _sum(h, bias)
    y = x.relu() if kind == "relu" else x * _normal(x)
    return dropout(y.reshape(-1, y.shape[-1]), dropout_p, seed).view(h.shape).to(h.dtype)


def activation_grad(
    dout: Tensor,
    saved: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of h from that of `activation`, and that of the bias in the compute dtype.

    ``saved`` is the result for relu, h for gelu. The bias gets the sum of h's over the rows.

    relu: ``dout * scale`` where the result is not 0, which shows both relu's and dropout's mask.
    gelu: ``dropout(dout * (Phi(x) + x phi(x)))``, x = h + bias, phi the density, the same mask.
    """
    g = dout.to(compute_dtype(dout.dtype))
    if kind == "relu":
        dh = torch.where(saved != 0, g * dropout_scale(dropout_p), 0)
    else:
        x = _sum(saved, bias)
        density = (x.square() * -0.5).exp() / math.sqrt(2 * math.pi)
        dh = g * (_normal(x) + x * density)
        dh = dropout(dh.reshape(-1, dh.shape[-1]), dropout_p, seed).view(dh.shape)
    return dh.to(dout.dtype), dh.reshape(-1, dh.shape[-1]).sum(0)


# ---- launches ------------------------------------------------------------------------------------


def activation_forward(a):
    """``out = dropout(act(h + bias))``; ``out`` may be ``h``."""
    a.out.copy_(activation(a.h, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed))


def activation_backward(a):
    """Gradients of activation_forward. ``saved`` is ``out`` for relu, which needs no bias, and
    ``h`` for gelu; ``dh`` may be ``dout`` or ``saved``."""
    grads = activation_grad(
        a.dout, a.saved, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed
    )
    a.dh.copy_(grads[0])
    put(a.dbias, grads[1])
