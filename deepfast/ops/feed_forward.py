"""The feed-forward block with the layer-norm in front of it: one op that decides what it keeps."""

import math

import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common
from deepfast.ops.activation import check_kind
from deepfast.ops.activation import compute as activate
from deepfast.ops.activation import compute_grad as activate_grad
from deepfast.ops.layer_norm import (
    check,
    compute,
    compute_grads,
    empty_grads,
    empty_results,
)
from deepfast.ops.register import register


def _forward(
    x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, eps, dropout_p, seed,
    activation, activation_p, activation_seed, keep, want_norm, backend,
):  # fmt: skip
    n, s, mean, rstd = compute(x, residual, norm_weight, norm_bias, eps, dropout_p, seed, backend)
    h = F.linear(n, up, up_bias)
    if not want_norm:
        n = x.new_empty(0)
    # ReLU's backward asks its output, so h itself is not needed; GELU's asks its input.
    a = activate(h, activation, activation_p, activation_seed, backend, activation == "relu")
    kept = x.new_empty(0) if not keep else a if activation == "relu" else h
    return F.linear(a, down, down_bias), s, n, mean, rstd, kept


def _fake(
    x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, eps, dropout_p, seed,
    activation, activation_p, activation_seed, keep, want_norm, backend,
):  # fmt: skip
    y, s, mean, rstd = empty_results(
        x, residual, norm_weight, norm_bias, eps, dropout_p, seed, backend
    )
    out = x.new_empty((*x.shape[:-1], down.shape[0]))
    kept = x.new_empty((*x.shape[:-1], up.shape[0]) if keep else 0)
    return out, s, y if want_norm else x.new_empty(0), mean, rstd, kept


def _matrix_grads(dy, x, want_weight, want_bias):
    """Of ``y = x W^T + b``: dW = dy^T x, db, as torch computes them."""
    dy = dy.reshape(-1, dy.shape[-1])
    dweight = dy.mT.mm(x.view(-1, x.shape[-1])) if want_weight else dy.new_empty(0)
    return dweight, dy.sum(0) if want_bias else dy.new_empty(0)


def _grad_forward(
    s, dout, dsum, dn, norm_weight, norm_bias, up, up_bias, down, mean, rstd, kept, eps, dropout_p,
    seed, activation, activation_p, activation_seed, wants, backend,
):  # fmt: skip
    if dout is None:
        dup, dup_bias, ddown, ddown_bias = (
            s.new_zeros(shape if want else 0)
            for shape, want in zip(_matrix_shapes(up, down), wants[4:], strict=True)
        )
    else:
        relu = activation == "relu"
        lean = kept.numel() == 0
        n = None
        if lean or wants[4]:
            # LN(s) again, the same bits as in forward.
            n = compute(s, None, norm_weight, norm_bias, eps, 0.0, None, backend)[0]
        if lean:
            kept = F.linear(n, up, up_bias)
        if lean or not relu:
            a = activate(kept, activation, activation_p, activation_seed, backend, relu)
        else:
            a = kept
        ddown, ddown_bias = _matrix_grads(dout, a, *wants[6:])
        if relu:
            kept = a
        del a
        dh = dout.matmul(down)
        dh = activate_grad(dh, kept, activation, activation_p, activation_seed, backend, True)
        del kept
        dup, dup_bias = _matrix_grads(dh, n, *wants[4:6])
        del n
        through = dh.matmul(up)
        del dh
        dn = through if dn is None else through.add_(dn)
    grads = compute_grads(s, dn, dsum, norm_weight, mean, rstd, dropout_p, seed, wants[:4], backend)
    return *grads, dup, dup_bias, ddown, ddown_bias


def _matrix_shapes(up, down):
    return up.shape, up.shape[:1], down.shape, down.shape[:1]


def _grad_fake(
    s, dout, dsum, dn, norm_weight, norm_bias, up, up_bias, down, mean, rstd, kept, eps, dropout_p,
    seed, activation, activation_p, activation_seed, wants, backend,
):  # fmt: skip
    grads = empty_grads(s, dn, dsum, norm_weight, mean, rstd, dropout_p, seed, wants[:4], backend)
    return *grads, *(
        s.new_empty(shape if want else 0)
        for shape, want in zip(_matrix_shapes(up, down), wants[4:], strict=True)
    )


def _flops(x, residual, norm_weight, norm_bias, up, up_bias, down, *_, **__) -> int:
    return 2 * math.prod(x) * (up[0] + down[0] * up[0] // x[-1])


def _grad_flops(s, dout, dsum, dn, nw, nb, up, up_bias, down, mean, rstd, kept, *_, **__) -> int:
    again = 2 * math.prod(s) * up[0] if list(kept) == [0] else 0
    return again + 2 * _flops(s, None, nw, nb, up, up_bias, down)


_feed_forward_grad = register(
    "feed_forward_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? dn, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor mean, Tensor rstd, "
    "Tensor kept, float eps, float dropout_p, Tensor? seed, str activation, float activation_p, "
    "Tensor? activation_seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dup, Tensor dup_bias, Tensor ddown, "
    "Tensor ddown_bias)",
    _grad_forward,
    fake=_grad_fake,
    flops=_grad_flops,
)


def _setup(ctx, inputs, output):
    (x, residual, norm_weight, norm_bias, up, up_bias, down, _, eps, dropout_p, seed, activation,
     activation_p, activation_seed, _, ctx.want_norm, backend) = inputs  # fmt: skip
    _, s, _, mean, rstd, kept = output
    ctx.changed = residual is not None or dropout_p > 0
    ctx.save_for_backward(
        s if ctx.changed else x, norm_weight, norm_bias, up, up_bias, down, mean, rstd, kept, seed,
        activation_seed,
    )  # fmt: skip
    ctx.options = eps, dropout_p, activation, activation_p, backend
    ctx.dtypes = [None if p is None else p.dtype for p in (norm_weight, norm_bias)]


def _backward(ctx, dout, dsum, dn, *_):
    if not ctx.changed:
        dsum = None
    if not ctx.want_norm:
        dn = None
    if dout is None and dsum is None and dn is None:
        return (None,) * 17
    (s, norm_weight, norm_bias, up, up_bias, down, mean, rstd, kept, seed, activation_seed) = (
        ctx.saved_tensors
    )
    eps, dropout_p, activation, activation_p, backend = ctx.options
    needs = ctx.needs_input_grad[:8]
    wants = list(needs)
    # Without dropout the gradients of x and residual are one tensor.
    shared = dropout_p == 0 and wants[1]
    if shared:
        wants[:2] = True, False
    dx, dresidual, *params = _feed_forward_grad(
        s, dout, dsum, dn, norm_weight, norm_bias, up, up_bias, down, mean, rstd, kept, eps,
        dropout_p, seed, activation, activation_p, activation_seed, wants, backend,
    )  # fmt: skip
    grads = [dx, dx if shared else dresidual, *params]
    for i, dtype in enumerate(ctx.dtypes, 2):
        grads[i] = grads[i].to(dtype) if needs[i] else None
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 9


def _cast(x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, *rest):
    x, residual, up, up_bias, down, down_bias = common.autocast(
        x, residual, up, up_bias, down, down_bias
    )
    return x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, *rest


_feed_forward = register(
    "feed_forward(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor up, "
    "Tensor? up_bias, Tensor down, Tensor? down_bias, float eps, float dropout_p, Tensor? seed, "
    "str activation, float activation_p, Tensor? activation_seed, bool keep, bool want_norm, "
    "str? backend) -> (Tensor out, Tensor sum, Tensor n, Tensor mean, Tensor rstd, Tensor kept)",
    _forward,
    fake=_fake,
    flops=_flops,
    cast=_cast,
    setup=_setup,
    backward=_backward,
    public=3,
)


def feed_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    activation: str = "relu",
    activation_dropout_p: float = 0.0,
    training: bool = False,
    keep: bool = True,
    want_norm: bool = False,
    seed: int | Tensor | None = None,
    activation_seed: int | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``dropout(act(n up^T + up_bias)) down^T + down_bias``, n = LN(s), s = residual + dropout(x).

    Backward keeps s and, with ``keep``, one hidden activation: the layer-norm is made again,
    dropout masks are replayed, ReLU's mask is where its output is not 0, GELU is made again from
    its input. Without ``keep`` the first product is made again too: a sixth more of the block's
    matrix work, a fifth of its memory at F = 4 D. The matrix products are torch's.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias: (D,) of the layer-norm, or None.
        up, up_bias: (F, D) and (F,) or None, in x's dtype.
        down, down_bias: (N, F) and (N,) or None, in x's dtype.
        eps: added to the variance.
        residual: shaped like x.
        dropout_p: on x; activation_dropout_p: on the hidden activation; both where ``training``.
        activation: "relu" or "gelu".
        keep: whether the hidden activation is kept for backward.
        want_norm: return n in place of s, as a post-norm layer needs it.
        seed, activation_seed: of the two masks, see `layer_norm`.
        backend: of layer-norm and activation, see `deepfast.backend`.

    Returns:
        (..., N), and s (x itself where nothing was added or dropped), or n with ``want_norm``.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the backend asked for cannot serve.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Vaswani et al., Attention Is All You Need, 2017; what is recomputed as in Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    name = "feed_forward"
    x, residual, dim = check(name, x, residual, norm_weight, norm_bias, eps, dropout_p)
    check_kind(name, activation, argument="activation")
    checks.probability(name, activation_dropout_p, argument="activation_dropout_p")
    names = "up", "F", "up_bias"
    up, up_bias = common.linear_operands(name, x, dim, names, up, up_bias)
    names = "down", "N", "down_bias"
    down, down_bias = common.linear_operands(name, x, up.shape[0], names, down, down_bias)
    p, q = (dropout_p, activation_dropout_p) if training else (0.0, 0.0)
    seed = common.draw_seed(name, seed, x.device) if p > 0 else None
    if q > 0:
        activation_seed = common.draw_seed(
            name, activation_seed, x.device, argument="activation_seed"
        )
    else:
        activation_seed = None
    out, total, n = _feed_forward(
        x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, eps, p, seed,
        activation, q, activation_seed, keep, want_norm, backend,
    )  # fmt: skip
    if want_norm:
        return out, n
    return out, x if residual is None and p == 0 else total
