"""Layer normalisation, with the residual add and dropout in front of it in the same pass."""

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.ops import common
from deepfast.ops.register import no_flops, register
from deepfast.reference.layer_norm import compute_dtype


def compute(x, residual, weight, bias, eps, dropout_p, seed, backend):
    _, launch = backends.choose("layer_norm", backend, x.device.type, x.dtype, x.shape[-1])
    rows, rest = common.rows(x), None if residual is None else common.rows(residual)
    w, b = common.parameter(weight, x.dtype), common.parameter(bias, x.dtype)
    y, s, mean, rstd = results = empty_results(
        x, residual, weight, bias, eps, dropout_p, seed, backend
    )
    changed = rest is not None or dropout_p > 0
    launch.layer_norm_forward(
        rows, rest, w, b, eps, dropout_p, seed, s.view(rows.shape) if changed else None,
        y.view(rows.shape), mean.view(-1), rstd.view(-1),
    )  # fmt: skip
    return results


def empty_results(x, residual, weight, bias, eps, dropout_p, seed, backend):
    # Results have the shape of x from the start: a view could not be changed in place. Without
    # residual and dropout the sum is x itself, and none is made.
    s = x.new_empty(0 if residual is None and dropout_p == 0 else x.shape)
    mean = x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape), s, mean, torch.empty_like(mean)


def compute_grads(s, dy, dsum, weight, mean, rstd, dropout_p, seed, wants, backend):
    _, launch = backends.choose("layer_norm", backend, s.device.type, s.dtype, s.shape[-1])
    rows = common.rows(s)
    results = empty_grads(s, dy, dsum, weight, mean, rstd, dropout_p, seed, wants, backend)
    dx, dresidual, dweight, dbias = (
        r if want else None for r, want in zip(results, wants, strict=True)
    )
    launch.layer_norm_backward(
        rows, torch.zeros_like(rows) if dy is None else common.rows(dy),
        None if dsum is None else common.rows(dsum), common.parameter(weight, s.dtype),
        mean.view(-1), rstd.view(-1), dropout_p, seed, None if dx is None else dx.view(rows.shape),
        None if dresidual is None else dresidual.view(rows.shape), dweight, dbias,
    )  # fmt: skip
    return results


def empty_grads(s, dy, dsum, weight, mean, rstd, dropout_p, seed, wants, backend):
    shapes = (s.shape, s.shape, s.shape[-1:], s.shape[-1:])
    dtypes = (s.dtype, s.dtype, mean.dtype, mean.dtype)
    return tuple(
        s.new_empty(shape if want else 0, dtype=dtype)
        for shape, dtype, want in zip(shapes, dtypes, wants, strict=True)
    )


_layer_norm_grad = register(
    "layer_norm_grad(Tensor sum, Tensor? dy, Tensor? dsum, Tensor? weight, Tensor mean, "
    "Tensor rstd, float dropout_p, Tensor? seed, bool[] wants, str? backend) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    compute_grads,
    fake=empty_grads,
    flops=no_flops,
)


def _setup(ctx, inputs, output):
    x, _, weight, bias, _, dropout_p, seed, backend = inputs
    _, s, mean, rstd = output
    ctx.changed = inputs[1] is not None or dropout_p > 0
    ctx.save_for_backward(s if ctx.changed else x, weight, mean, rstd, seed)
    ctx.dropout_p, ctx.backend = dropout_p, backend
    ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]


def _backward(ctx, dy, dsum, *_):
    if not ctx.changed:
        dsum = None
    if dy is None and dsum is None:
        return (None,) * 8
    s, weight, mean, rstd, seed = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:4])
    # Without dropout the two gradients are one: the same tensor object, not two views, which two
    # leaves would each keep as a gradient of their own.
    shared = ctx.dropout_p == 0 and wants[1]
    if shared:
        wants[:2] = True, False
    dx, dresidual, dweight, dbias = _layer_norm_grad(
        s, dy, dsum, weight, mean, rstd, ctx.dropout_p, seed, wants, ctx.backend
    )
    need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
    return (
        dx if need_x else None,
        (dx if shared else dresidual) if need_residual else None,
        dweight.to(ctx.dtypes[0]) if need_weight else None,
        dbias.to(ctx.dtypes[1]) if need_bias else None,
        *(None,) * 4,
    )


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, "
    "float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    compute,
    fake=empty_results,
    flops=no_flops,
    cast=lambda x, residual, *rest: (*common.autocast(x, residual), *rest),
    setup=_setup,
    backward=_backward,
    public=2,
)


def check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None, int]:
    """x and residual as autocast wants them, and D; the operands of ``op`` fit afterwards."""
    checks.tensor(op, "x", x)
    if residual is not None:
        checks.tensor(op, "residual", residual)
    x, residual = common.autocast(x, residual)
    if residual is not None:
        checks.like(op, "residual", residual, "x", x)
    dim = x.shape[-1]
    checks.parameter(op, "weight", weight, (dim,), x.device)
    checks.parameter(op, "bias", bias, (dim,), x.device)
    checks.eps(op, eps)
    checks.probability(op, dropout_p)
    return x, residual, dim


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
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
        seed: of the dropout mask, an int or a 0-dim int64 tensor on x's device; None draws one
            from torch's generator of that device.
        backend: see `deepfast.backend`.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    x, residual, _ = check("layer_norm", x, residual, weight, bias, eps, dropout_p)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("layer_norm", seed, x.device) if p > 0 else None
    y, total = _layer_norm(x, residual, weight, bias, eps, p, seed, backend)
    return y if residual is None else (y, total)
