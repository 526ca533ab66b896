"""Layer normalisation and a linear map as one op, which saves no normalised copy for backward."""

import math

import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common, norm
from deepfast.ops.register import register


def _forward(a):
    n, s, mean, rstd = norm.compute(a)
    return F.linear(n, a.weight, a.bias), s, mean, rstd


def _fake(a):
    _, s, mean, rstd = norm.empty_results(a)
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0])), s, mean, rstd


def _empty_products(a, make):
    """dweight and dbias, each without elements where it is not wanted."""
    shape, (*_, want_weight, want_bias) = a.weight.shape, a.wants
    return make(shape if want_weight else 0), make(shape[0] if want_bias else 0)


def _grad_forward(a):
    *_, want_weight, want_bias = a.wants
    if a.dout is None:
        return *norm.compute_grads(a, None), *_empty_products(a, a.weight.new_zeros)
    n = norm.recomputed(a) if want_weight else None
    products = common.linear_grads(a.dout, n, want_weight, want_bias)
    return *norm.compute_grads(a, a.dout.matmul(a.weight)), *products


_norm_linear_grad = register(
    "norm_linear_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor weight, Tensor mean, Tensor rstd, float eps, bool rms, "
    "float dropout_p, Tensor? seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight, Tensor dbias)",
    _grad_forward,
    fake=lambda a: (*norm.empty_grads(a), *_empty_products(a, a.weight.new_empty)),
    flops=lambda a: 4 * math.prod(a.sum) * a.weight[0],
)


def _plain(a):
    n, s = norm.plain_norm(a)
    return F.linear(n, a.weight, a.bias), s


_norm_linear = register(
    "norm_linear(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor weight, Tensor? bias, float eps, bool rms, float dropout_p, Tensor? seed, "
    "str? backend) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=lambda a: 2 * math.prod(a.x) * a.weight[0],
    cast=("x", "residual", "weight", "bias"),
    setup=lambda ctx, a, results: norm.kept_to_recompute(ctx, a, results) | {"weight": a.weight},
    backward=lambda ctx, kept, grads: norm.norm_gradients(
        _norm_linear_grad, ctx, kept, grads.sum, dout=grads.out
    ),
    plain=_plain,
    public=2,
)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``LN(s) weight^T + bias`` with ``s = residual + dropout(x)``.

    Autograd saves s and not LN(s). Backward recomputes LN(s) for the weight's gradient, which costs
    one pass over s. The matrix products are torch's.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias: (D,), parameters of the layer-norm, or None.
        weight: (N, D), in x's dtype.
        bias: (N,), or None.
        eps: added to the variance.
        rms: whether the norm is `rms_norm` instead.
        residual: shaped like x. With a residual the sum s is returned too.
        dropout_p, training, seed: as in `layer_norm`.
        backend: backend of the layer-norm, see `deepfast.backend`.

    Returns:
        (..., N); with ``residual``, also s.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016; the recomputation as in Liger-Kernel's
    and Apex's memory-efficient layer-norms.
    """
    x, residual, dim = norm.check(
        "norm_linear", x, residual, (norm_weight, norm_bias, eps, rms), dropout_p, prefix="norm_"
    )
    checks.flag("norm_linear", training=training)
    names = "weight", "N", "bias"
    weight, bias = common.linear_operands("norm_linear", x, dim, names, weight, bias)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("norm_linear", seed, x.device) if p > 0 else None
    out, total = _norm_linear(
        x, residual, norm_weight, norm_bias, weight, bias, eps, rms, p, seed, backend
    )
    return out if residual is None else (out, total)
