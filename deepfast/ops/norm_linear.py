"""Layer normalisation and a linear map as one op, which saves no normalised copy for backward."""

import math

import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common
from deepfast.ops.layer_norm import (
    check,
    compute,
    compute_grads,
    empty_grads,
    empty_results,
    kept_sum,
    norm_gradients,
    plain_norm,
)
from deepfast.ops.register import register


def _forward(a):
    n, s, mean, rstd = compute(
        a.x, a.residual, a.norm_weight, a.norm_bias, a.eps, a.rms, a.dropout_p, a.seed, a.backend
    )
    return F.linear(n, a.weight, a.bias), s, mean, rstd


def _fake(a):
    _, s, mean, rstd = empty_results(a.x, a.residual, a.rms, a.dropout_p)
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0])), s, mean, rstd


def _empty_products(a, want, make):
    """dweight and dbias, each without elements where it is not wanted."""
    shape = a.weight.shape
    return make(shape if want.dweight else 0), make(shape[0] if want.dbias else 0)


def _grad_forward(a):
    want, dn, n = _norm_linear_grad.results._make(a.wants), None, None
    if a.dout is None:
        products = _empty_products(a, want, a.weight.new_zeros)
    else:
        dn = a.dout.matmul(a.weight)
        if want.dweight:
            # Recomputes n, with the same bits as in forward.
            n, *_ = compute(
                a.sum, None, a.norm_weight, a.norm_bias, a.eps, a.rms, 0.0, None, a.backend
            )
        products = common.linear_grads(a.dout, n, want.dweight, want.dbias)
    grads = compute_grads(
        a.sum, dn, a.dsum, a.norm_weight, a.rms, a.mean, a.rstd, a.dropout_p, a.seed, a.wants[:4],
        a.backend,
    )  # fmt: skip
    return *grads, *products


def _grad_fake(a):
    want = _norm_linear_grad.results._make(a.wants)
    products = _empty_products(a, want, a.weight.new_empty)
    return *empty_grads(a.sum, a.rstd, a.wants[:4]), *products


_norm_linear_grad = register(
    "norm_linear_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor weight, Tensor mean, Tensor rstd, float eps, bool rms, "
    "float dropout_p, Tensor? seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight, Tensor dbias)",
    _grad_forward,
    fake=_grad_fake,
    flops=lambda a: 4 * math.prod(a.sum) * a.weight[0],
)


def _plain(a):
    n, s = plain_norm(a, a.norm_weight, a.norm_bias)
    return F.linear(n, a.weight, a.bias), s


def _setup(ctx, a, results):
    return {
        "sum": kept_sum(ctx, a, results), "norm_weight": common.detached(a.norm_weight),
        "norm_bias": common.detached(a.norm_bias), "weight": a.weight, "mean": results.mean,
        "rstd": results.rstd, "eps": a.eps, "rms": a.rms, "dropout_p": a.dropout_p, "seed": a.seed,
        "backend": a.backend,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    dsum = grads.sum if ctx.changed else None
    if grads.out is None and dsum is None:
        return {}
    return norm_gradients(_norm_linear_grad, ctx, kept, dout=grads.out, dsum=dsum)


_norm_linear = register(
    "norm_linear(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor weight, Tensor? bias, float eps, bool rms, float dropout_p, Tensor? seed, "
    "str? backend) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=lambda a: 2 * math.prod(a.x) * a.weight[0],
    cast=("x", "residual", "weight", "bias"),
    setup=_setup,
    backward=_backward,
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
    x, residual, dim = check(
        "norm_linear", x, residual, norm_weight, norm_bias, eps, dropout_p, prefix="norm_"
    )
    checks.flag("norm_linear", rms=rms, training=training)
    names = "weight", "N", "bias"
    weight, bias = common.linear_operands("norm_linear", x, dim, names, weight, bias)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("norm_linear", seed, x.device) if p > 0 else None
    out, total = _norm_linear(
        x, residual, norm_weight, norm_bias, weight, bias, eps, rms, p, seed, backend
    )
    return out if residual is None else (out, total)
