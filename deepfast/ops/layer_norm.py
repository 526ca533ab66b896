"""Layer normalisation, with the residual add and dropout in front of it in the same pass."""

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast.reference.layer_norm import compute_dtype

from . import _common as common


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, dropout_p, seed, launch):
        rows, rest = common.rows(x), None if residual is None else common.rows(residual)
        w, b = common.parameter(weight, x.dtype), common.parameter(bias, x.dtype)
        # Without residual and dropout the sum is x itself.
        changed = rest is not None or dropout_p > 0
        # Results have the shape of x from the start: a view could not be changed in place.
        y = x.new_empty(x.shape)
        s = x.new_empty(x.shape) if changed else None
        total = s.view(rows.shape) if changed else rows
        mean = rows.new_empty(rows.shape[0], dtype=compute_dtype(x.dtype))
        rstd = torch.empty_like(mean)
        launch.layer_norm_forward(
            rows, rest, w, b, eps, dropout_p, seed, total if changed else None,
            y.view(rows.shape), mean, rstd,
        )  # fmt: skip
        ctx.save_for_backward(s if changed else x, w, mean, rstd)
        ctx.dropout_p, ctx.seed, ctx.launch = dropout_p, seed, launch
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return y, s

    @staticmethod
    @common.first_order("layer_norm")
    def backward(ctx, dy, dsum):
        if dy is None and dsum is None:
            return (None,) * 8
        s, w, mean, rstd = ctx.saved_tensors
        total, shape = common.rows(s), s.shape
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        dy = torch.zeros_like(total) if dy is None else common.rows(dy)
        dsum = None if dsum is None else common.rows(dsum)

        def empty(need, like):
            fresh = torch.empty_like(like, memory_format=torch.contiguous_format)
            return fresh if need else None

        dx = empty(need_x, total)
        # Without dropout the two gradients are one.
        dresidual = dx if ctx.dropout_p == 0 and need_x else empty(need_residual, total)
        dim = mean.new_empty(total.shape[1])
        dweight, dbias = empty(need_weight, dim), empty(need_bias, dim)
        ctx.launch.layer_norm_backward(
            total, dy, dsum, w, mean, rstd, ctx.dropout_p, ctx.seed, dx,
            None if dresidual is dx else dresidual, dweight, dbias,
        )  # fmt: skip
        # The same tensor object, not two views: two leaves would each keep one as their gradient.
        dx_out = None if dx is None else dx.view(shape)
        dresidual_out = dx_out
        if dresidual is not dx:
            dresidual_out = None if dresidual is None else dresidual.view(shape)
        return (
            dx_out,
            dresidual_out if need_residual else None,
            dweight.to(ctx.dtypes[0]) if need_weight else None,
            dbias.to(ctx.dtypes[1]) if need_bias else None,
            *(None,) * 4,
        )


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation of ``s = residual + dropout(x)`` over the last dimension.

    ``y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias`` with the biased variance, computed
    in fp32 (fp64 for fp64 input). One read of each operand, one write of each result; the dropout
    mask is replayed in backward from ``seed``, never stored.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        weight, bias: (D,), any of these dtypes, or None.
        eps: added to the variance.
        residual: shaped like x. With it the sum is returned too.
        dropout_p: probability that an element of x becomes 0, while ``training``.
        training: whether dropout applies.
        seed: of the dropout mask; None draws one from torch's CPU generator.
        backend: see `deepfast.backend`.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    common.check_tensor("layer_norm", "x", x)
    if residual is not None:
        common.check_tensor("layer_norm", "residual", residual)
    x, residual = common.autocast(x, residual)
    if residual is not None:
        common.check_like("layer_norm", "residual", residual, "x", x)
    common.check_parameter("layer_norm", "weight", weight, (x.shape[-1],), x.device)
    common.check_parameter("layer_norm", "bias", bias, (x.shape[-1],), x.device)
    common.check_dropout("layer_norm", dropout_p)
    p = dropout_p if training else 0.0
    _, launch = backends.choose("layer_norm", backend, x.device.type, x.dtype)
    seed = common.draw_seed(seed) if p > 0 else 0
    y, total = _LayerNorm.apply(x, residual, weight, bias, eps, p, seed, launch)
    return y if residual is None else (y, total)
