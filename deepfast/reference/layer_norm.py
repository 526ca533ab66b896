"""Layer normalisation (Ba, Kiros, Hinton 2016) and RMS normalisation (Zhang, Sennrich 2019), after
dropout and a residual sum."""

from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.dropout import Seed, add_dropout, dropout
from deepfast.reference.rows import affine, load, norm_backward, normalised, put


def normalise(x: Tensor, eps: float, rms: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    """(x - mean) * rstd, mean and rstd over the last dimension; biased variance, two passes.

    The mean of x - mean corrects the mean, so that a large mean or a constant x causes no rounding
    error (Chan, Golub, LeVeque 1983). With ``rms`` no mean is subtracted, and mean is None.
    """
    mean = None
    if not rms:
        mean = x.mean(-1, keepdim=True)
        mean = mean + (x - mean).mean(-1, keepdim=True)
        x, mean = x - mean, mean.squeeze(-1)
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd, mean, rstd.squeeze(-1)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """``s = residual + dropout(x)``; returns ``(LN(s) * weight + bias, s)``, shaped like x."""
    s = add_dropout(x, residual, dropout_p, seed)
    n, _, _ = normalise(s.to(compute_dtype(x.dtype)), eps, rms)
    y = n if weight is None else n * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), s


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``layer_norm`` without mean and bias: ``s / sqrt(mean(s^2) + eps) * weight``, and s."""
    return layer_norm(x, weight, None, eps, rms=True)


# ---- launches ------------------------------------------------------------------------------------


def layer_norm_forward(a):
    """``sum = residual + dropout(x)``, ``y = LN(sum) * weight + bias``.

    With ``rms`` the normalisation subtracts no mean, and ``mean`` is None.
    """
    s = dropout(load(a.x), a.dropout_p, a.seed)
    s = s if a.residual is None else s + load(a.residual)
    if a.sum is not None:
        a.sum.copy_(s)
        s = load(a.sum)
    n, m, r = normalise(s, a.eps, a.rms)
    put(a.mean, m)
    a.rstd.copy_(r)
    a.y.copy_(affine(n, a.weight, a.bias))


def layer_norm_backward(a):
    """Gradients of layer_norm_forward from ``dy`` and, unless it is None, ``dsum``."""
    n = normalised(load(a.sum), a.mean, a.rstd)
    g = load(a.dy)
    put(a.dweight, (g * n).sum(0))
    put(a.dbias, g.sum(0))
    ds = norm_backward(affine(g, a.weight, None), n, a.rstd, a.rms)
    ds = ds if a.dsum is None else ds + load(a.dsum)
    put(a.dresidual, ds)
    put(a.dx, dropout(ds, a.dropout_p, a.seed))
