"""Layer and RMS normalisation, with the dropout and residual add before it in the same pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, no_flops, register
from deepfast.reference.layer_norm import layer_norm as reference


def compute(x, residual, weight, bias, eps, rms, dropout_p, seed, backend):
    """y, sum, mean and rstd of the op, without autograd.

    sum is empty where it equals x, and mean with ``rms``.
    """
    _, launch = backends.choose("layer_norm", backend, x.device, x.dtype, x.shape[-1])
    y, sum, mean, rstd = results = empty_results(x, residual, rms, dropout_p)
    changed = residual is not None or dropout_p > 0
    residual = None if residual is None else common.rows(residual)
    weight, bias = common.parameter(weight, x.dtype), common.parameter(bias, x.dtype)
    x = common.rows(x)
    launch.layer_norm_forward(
        x=x, residual=residual, weight=weight, bias=bias, eps=eps, rms=rms, dropout_p=dropout_p,
        seed=seed, sum=sum.view(x.shape) if changed else None, y=y.view(x.shape),
        mean=None if rms else mean.view(-1), rstd=rstd.view(-1),
    )  # fmt: skip
    return results


def empty_results(x, residual, rms, dropout_p):
    # Results are allocated in x's shape: the caller could not modify a view in place. Without
    # residual and dropout the sum is x itself, and is not allocated.
    s = x.new_empty(0 if residual is None and dropout_p == 0 else x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape), s, rstd.new_empty(0) if rms else torch.empty_like(rstd), rstd


def compute_grads(s, dy, dsum, weight, rms, mean, rstd, dropout_p, seed, wants, backend):
    """dx, dresidual, dweight and dbias, each empty where its entry of ``wants`` is False."""
    _, launch = backends.choose("layer_norm", backend, s.device, s.dtype, s.shape[-1])
    results = empty_grads(s, rstd, wants)
    dx, dresidual, dweight, dbias = (
        r if want else None for r, want in zip(results, wants, strict=True)
    )
    sum = common.rows(s)
    dy = torch.zeros_like(sum) if dy is None else common.rows(dy)
    dsum = None if dsum is None else common.rows(dsum)
    launch.layer_norm_backward(
        sum=sum, dy=dy, dsum=dsum, weight=common.parameter(weight, s.dtype), rms=rms,
        mean=None if rms else mean.view(-1), rstd=rstd.view(-1), dropout_p=dropout_p, seed=seed,
        dx=None if dx is None else dx.view(sum.shape),
        dresidual=None if dresidual is None else dresidual.view(sum.shape), dweight=dweight,
        dbias=dbias,
    )  # fmt: skip
    return results


def empty_grads(s, rstd, wants):
    shapes = (s.shape, s.shape, s.shape[-1:], s.shape[-1:])
    dtypes = (s.dtype, s.dtype, rstd.dtype, rstd.dtype)
    return tuple(
        s.new_empty(shape if want else 0, dtype=dtype)
        for shape, dtype, want in zip(shapes, dtypes, wants, strict=True)
    )


_layer_norm_grad = register(
    "layer_norm_grad(Tensor sum, Tensor? dy, Tensor? dsum, Tensor? weight, bool rms, Tensor mean, "
    "Tensor rstd, float dropout_p, Tensor? seed, bool[] wants, str? backend) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    lambda a: compute_grads(*a),
    fake=lambda a: empty_grads(a.sum, a.rstd, a.wants),
    flops=no_flops,
)


def kept_sum(ctx, a, results) -> Tensor:
    """The tensor that backward normalises: x itself without residual and dropout."""
    ctx.changed = a.residual is not None or a.dropout_p > 0
    return results.sum if ctx.changed else a.x


def norm_gradients(op, ctx, kept: dict, **grads: Tensor | None) -> dict[str, Tensor]:
    """`gradients` of an op that begins with a layer-norm of ``residual + dropout(x)``."""
    # Without dropout x and residual have the same gradient, and get the same tensor object. Two
    # views of it would become the .grad of two leaves, which would then share memory.
    shared = kept["dropout_p"] == 0 and ctx.needs.residual
    wants = {"dx": True, "dresidual": False} if shared else {}
    found = gradients(op, ctx, kept, wants, **grads)
    if shared:
        found["residual"] = found["x"]
    return found


def plain_norm(a, weight, bias) -> tuple[Tensor, Tensor]:
    """y and sum of an op that begins with a layer-norm, in plain torch."""
    return reference(
        a.x, weight, bias, a.eps, residual=a.residual, dropout_p=a.dropout_p, seed=a.seed, rms=a.rms
    )


def _setup(ctx, a, results):
    return {
        "sum": kept_sum(ctx, a, results), "weight": a.weight, "rms": a.rms,
        "mean": results.mean, "rstd": results.rstd, "dropout_p": a.dropout_p, "seed": a.seed,
        "backend": a.backend,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    dsum = grads.sum if ctx.changed else None
    if grads.y is None and dsum is None:
        return {}
    return norm_gradients(_layer_norm_grad, ctx, kept, dy=grads.y, dsum=dsum)


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, "
    "bool rms, float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    lambda a: compute(*a),
    fake=lambda a: empty_results(a.x, a.residual, a.rms, a.dropout_p),
    flops=no_flops,
    setup=_setup,
    backward=_backward,
    plain=lambda a: plain_norm(a, a.weight, a.bias),
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
    *,
    prefix: str = "",
    cast: Callable = common.autocast,
) -> tuple[Tensor, Tensor | None, int]:
    """Checks the operands of ``op``; returns x and residual, cast for autocast, and D.

    prefix: what stands before "weight" and "bias" in the op's names for them.
    cast: what autocast does to x and residual.
    """
    checks.tensor(op, "x", x)
    if residual is not None:
        checks.tensor(op, "residual", residual)
    x, residual = cast(x, residual)
    if residual is not None:
        checks.like(op, "residual", residual, "x", x)
    dim = x.shape[-1]
    checks.parameter(op, f"{prefix}weight", weight, (dim,), x.device)
    checks.parameter(op, f"{prefix}bias", bias, (dim,), x.device)
    checks.eps(op, eps)
    checks.probability(op, dropout_p)
    return x, residual, dim


def normalise(op, x, residual, weight, bias, eps, rms, dropout_p, training, seed, backend):
    """`layer_norm` or, with ``rms``, `rms_norm`; errors begin with ``op``."""
    common.reverse_mode_only(op)
    x, residual, _ = check(op, x, residual, weight, bias, eps, dropout_p, cast=common.alike)
    checks.flag(op, training=training)
    p = dropout_p if training else 0.0
    seed = common.draw_seed(op, seed, x.device) if p > 0 else None
    y, total = _layer_norm(x, residual, weight, bias, eps, rms, p, seed, backend)
    return y if residual is None else (y, total)


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
    in fp32 (fp64 for fp64 input). The kernel reads each operand once and writes each result once.
    The dropout mask is not stored: backward regenerates it from ``seed``.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64; y and s have its dtype, under autocast too.
        weight, bias: (D,), any of these dtypes, or None.
        eps: added to the variance.
        residual: shaped like x. With a residual the sum s is returned too. Under autocast x and
            residual may have different dtypes; y and s are then fp32.
        dropout_p: probability that an element of x becomes 0, while ``training``.
        training: whether dropout applies.
        seed: seed of the dropout mask, an int or a 0-dim int64 tensor on x's device; None draws one
            from torch's generator of that device.
        backend: see `deepfast.backend`.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    return normalise(
        "layer_norm", x, residual, weight, bias, eps, False, dropout_p, training, seed, backend
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation of ``s = residual + dropout(x)`` over the last dimension.

    ``y = s / sqrt(mean(s^2) + eps) * weight``. Everything else is as in `layer_norm`, whose kernels
    it shares.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64; y and s have its dtype, under autocast too.
        weight: (D,), any of these dtypes, or None.
        eps: added to the mean square.
        residual, dropout_p, training, seed, backend: as in `layer_norm`. `deepfast.backend` lists
            the op as ``layer_norm``.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError, BackendError, RuntimeError, NotImplementedError: as `layer_norm`.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return normalise(
        "rms_norm", x, residual, weight, None, eps, True, dropout_p, training, seed, backend
    )
