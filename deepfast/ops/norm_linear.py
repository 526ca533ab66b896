"""Layer normalisation followed by a linear map, which keeps no normalised copy for backward."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.ops import common
from deepfast.ops.layer_norm import (
    check,
    compute,
    compute_grads,
    empty_grads,
    empty_results,
)
from deepfast.ops.register import register


def _normed(s, norm_weight, norm_bias, eps, backend):
    """LN(s) again, the same bits as in forward."""
    return compute(s, None, norm_weight, norm_bias, eps, 0.0, None, backend)[0]


def _forward(
    x, residual, norm_weight, norm_bias, weight, bias, eps, dropout_p, seed, backend
):  # fmt: skip
    n, s, mean, rstd = compute(x, residual, norm_weight, norm_bias, eps, dropout_p, seed, backend)
    return F.linear(n, weight, bias), s, mean, rstd


def _fake(x, residual, norm_weight, norm_bias, weight, bias, eps, dropout_p, seed, backend):
    _, s, mean, rstd = empty_results(
        x, residual, norm_weight, norm_bias, eps, dropout_p, seed, backend
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0])), s, mean, rstd


def _grad_forward(
    s, dout, dsum, norm_weight, norm_bias, weight, mean, rstd, eps, dropout_p, seed, wants, backend
):
    dweight, dbias = weight.new_empty(0), weight.new_empty(0)
    if dout is None:
        dn = None
        dweight = torch.zeros_like(weight) if wants[4] else dweight
        dbias = weight.new_zeros(weight.shape[0]) if wants[5] else dbias
    else:
        dn = dout.matmul(weight)
        flat = dout.reshape(-1, dout.shape[-1])
        if wants[4]:
            n = _normed(s, norm_weight, norm_bias, eps, backend)
            dweight = flat.mT.mm(n.view(-1, n.shape[-1]))
        if wants[5]:
            dbias = flat.sum(0)
    grads = compute_grads(s, dn, dsum, norm_weight, mean, rstd, dropout_p, seed, wants[:4], backend)
    return *grads, dweight, dbias


def _grad_fake(
    s, dout, dsum, norm_weight, norm_bias, weight, mean, rstd, eps, dropout_p, seed, wants, backend
):
    grads = empty_grads(s, dout, dsum, norm_weight, mean, rstd, dropout_p, seed, wants[:4], backend)
    dweight = weight.new_empty(weight.shape if wants[4] else 0)
    return *grads, dweight, weight.new_empty(weight.shape[0] if wants[5] else 0)


def _flops(x, residual, norm_weight, norm_bias, weight, *_, **__) -> int:
    return 2 * math.prod(x) * weight[0]


_norm_linear_grad = register(
    "norm_linear_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor weight, Tensor mean, Tensor rstd, float eps, float dropout_p, "
    "Tensor? seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight, Tensor dbias)",
    _grad_forward,
    fake=_grad_fake,
    flops=lambda s, dout, dsum, nw, nb, weight, *_, **__: 2 * _flops(s, None, nw, nb, weight),
)


def _setup(ctx, inputs, output):
    x, _, norm_weight, norm_bias, weight, _, eps, dropout_p, seed, backend = inputs
    _, s, mean, rstd = output
    ctx.changed = inputs[1] is not None or dropout_p > 0
    ctx.save_for_backward(s if ctx.changed else x, norm_weight, norm_bias, weight, mean, rstd, seed)
    ctx.options = eps, dropout_p, backend
    ctx.dtypes = [None if p is None else p.dtype for p in (norm_weight, norm_bias)]


def _backward(ctx, dout, dsum, *_):
    if not ctx.changed:
        dsum = None
    if dout is None and dsum is None:
        return (None,) * 10
    s, norm_weight, norm_bias, weight, mean, rstd, seed = ctx.saved_tensors
    eps, dropout_p, backend = ctx.options
    needs = ctx.needs_input_grad[:6]
    wants = list(needs)
    # Without dropout the gradients of x and residual are one tensor.
    shared = dropout_p == 0 and wants[1]
    if shared:
        wants[:2] = True, False
    dx, dresidual, *params = _norm_linear_grad(
        s, dout, dsum, norm_weight, norm_bias, weight, mean, rstd, eps, dropout_p, seed, wants,
        backend,
    )  # fmt: skip
    grads = [dx, dx if shared else dresidual, *params]
    for i, dtype in enumerate(ctx.dtypes, 2):
        grads[i] = grads[i].to(dtype) if needs[i] else None
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 4


def _cast(x, residual, norm_weight, norm_bias, weight, bias, *rest):
    x, residual, weight, bias = common.autocast(x, residual, weight, bias)
    return x, residual, norm_weight, norm_bias, weight, bias, *rest


_norm_linear = register(
    "norm_linear(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor weight, Tensor? bias, float eps, float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=_flops,
    cast=_cast,
    setup=_setup,
    backward=_backward,
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
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``LN(s) weight^T + bias`` with ``s = residual + dropout(x)``.

    Backward keeps s alone: LN's output, which a linear layer would keep for its weight's gradient,
    is made again, at the price of one pass over s. The matrix products are torch's.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias: (D,) of the layer-norm, or None.
        weight: (N, D), in x's dtype.
        bias: (N,), or None.
        eps: added to the variance.
        residual: shaped like x. With it the sum is returned too.
        dropout_p, training, seed: as in `layer_norm`.
        backend: of the layer-norm, see `deepfast.backend`.

    Returns:
        (..., N); with ``residual``, that and s.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016; the recomputation as in Liger-Kernel's
    and Apex's memory-efficient layer-norms.
    """
    x, residual, dim = check("norm_linear", x, residual, norm_weight, norm_bias, eps, dropout_p)
    names = "weight", "N", "bias"
    weight, bias = common.linear_operands("norm_linear", x, dim, names, weight, bias)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("norm_linear", seed, x.device) if p > 0 else None
    out, total = _norm_linear(
        x, residual, norm_weight, norm_bias, weight, bias, eps, p, seed, backend
    )
    return out if residual is None else (out, total)
