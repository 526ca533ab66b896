"""The norm of ``residual + dropout(x)`` with which `layer_norm`, `norm_linear` and `feed_forward`
begin: forward, backward and checks on the operands that the three ops share."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, no_flops, register
from deepfast.reference.layer_norm import layer_norm as reference

TYPES = ("layer", "rms")
"""`layer_norm`, and `rms_norm` without a bias."""


def compute(a):
    """y, sum, mean and rstd of an op that begins with a norm of ``residual + dropout(x)``, without
    autograd. sum is empty where it equals x, and mean with ``rms``.

    a: the op's operands; of the norm they are those of the op layer_norm below.
    """
    x, (y, sum, mean, rstd) = common.rows(a.x), empty_results(a)
    _, launch = backends.choose("layer_norm", a.backend, x.device, x.dtype, x.shape[-1])
    launch.layer_norm_forward(
        x=x, residual=common.rows(a.residual), weight=common.parameter(a.norm_weight, x.dtype),
        bias=common.parameter(a.norm_bias, x.dtype), eps=a.eps, rms=a.rms, dropout_p=a.dropout_p,
        seed=a.seed, sum=common.rows(sum), y=common.rows(y), mean=mean, rstd=rstd,
    )  # fmt: skip
    return y, sum, mean, rstd


def _changed(a) -> bool:
    """Whether the sum is not x itself."""
    return a.residual is not None or a.dropout_p > 0


def empty_results(a):
    # Results are allocated in x's shape: the caller could not modify a view in place.
    y = common.empty_contiguous(a.x)
    sum = torch.empty_like(y) if _changed(a) else None
    rstd = y.new_empty(y.numel() // y.shape[-1], dtype=compute_dtype(y.dtype))
    return y, sum, None if a.rms else torch.empty_like(rstd), rstd


def recomputed(a):
    """y again, from the sum and with the same bits as in forward."""
    norm = a.norm_weight, a.norm_bias, a.eps, a.rms
    return compute(layer_norm.operands(a.sum, None, *norm, 0.0, None, a.backend))[0]


def compute_grads(a, dy):
    """dx, dresidual, dnorm_weight and dnorm_bias, each None where its entry of ``wants`` is False.

    a: the operands of the op's gradient, see `layer_norm_grad` below.
    """
    sum, results = common.rows(a.sum), empty_grads(a)
    dx, dresidual, dweight, dbias = results
    _, launch = backends.choose("layer_norm", a.backend, sum.device, sum.dtype, sum.shape[-1])
    launch.layer_norm_backward(
        sum=sum, dy=torch.zeros_like(sum) if dy is None else common.rows(dy),
        dsum=common.rows(a.dsum), weight=common.parameter(a.norm_weight, sum.dtype), rms=a.rms,
        mean=None if a.rms else a.mean, rstd=a.rstd, dropout_p=a.dropout_p, seed=a.seed,
        dx=common.rows(dx), dresidual=common.rows(dresidual), dweight=dweight, dbias=dbias,
    )  # fmt: skip
    return results


def empty_grads(a):
    s, (want_x, want_residual, want_weight, want_bias, *_) = a.sum, a.wants
    return (
        common.empty_contiguous(s) if want_x else None,
        common.empty_contiguous(s) if want_residual else None,
        a.rstd.new_empty(s.shape[-1]) if want_weight else None,
        a.rstd.new_empty(s.shape[-1]) if want_bias else None,
    )


_layer_norm_grad = register(
    "layer_norm_grad(Tensor sum, Tensor? dy, Tensor? dsum, Tensor? norm_weight, bool rms, "
    "Tensor? mean, Tensor rstd, float dropout_p, Tensor? seed, bool[] wants, str? backend) "
    "-> (Tensor dx, Tensor dresidual, Tensor dnorm_weight, Tensor dnorm_bias)",
    lambda a: compute_grads(a, a.dy),
    fake=empty_grads,
    flops=no_flops,
)


def kept(ctx, a, results) -> dict:
    """What backward needs of the norm at least. It normalises x itself without residual and
    dropout."""
    ctx.changed = _changed(a)
    return {
        "sum": results.sum if ctx.changed else a.x, "norm_weight": a.norm_weight, "rms": a.rms,
        "mean": results.mean, "rstd": results.rstd, "dropout_p": a.dropout_p, "seed": a.seed,
        "backend": a.backend,
    }  # fmt: skip


def kept_to_recompute(ctx, a, results) -> dict:
    """The same where backward also recomputes y."""
    parameters = {name: common.detached(getattr(a, name)) for name in ("norm_weight", "norm_bias")}
    return kept(ctx, a, results) | parameters | {"eps": a.eps}


def norm_gradients(op, ctx, kept: dict, dsum, **grads: Tensor | None) -> dict[str, Tensor]:
    """`gradients` of an op that begins with a norm.

    dsum: the gradient of the sum; it counts where the sum is not x itself.
    """
    dsum = dsum if ctx.changed else None
    if dsum is None and set(grads.values()) == {None}:
        return {}
    # Without dropout x and residual have the same gradient, and get the same tensor object. Two
    # views of it would become the .grad of two leaves, which would then share memory.
    shared = kept["dropout_p"] == 0 and ctx.needs.residual
    if shared:
        ctx.needs = ctx.needs._replace(x=True, residual=False)
    found = gradients(op, ctx, kept, dsum=dsum, **grads)
    if shared:
        found["residual"] = found["x"]
    return found


def plain_norm(a) -> tuple[Tensor, Tensor]:
    """y and sum of an op that begins with a norm, in plain torch."""
    return reference(
        a.x, a.norm_weight, a.norm_bias, a.eps, residual=a.residual, dropout_p=a.dropout_p,
        seed=a.seed, rms=a.rms,
    )  # fmt: skip


layer_norm = register(
    "layer_norm(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, float eps, "
    "bool rms, float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    compute,
    fake=empty_results,
    flops=no_flops,
    setup=kept,
    backward=lambda ctx, kept, grads: norm_gradients(
        _layer_norm_grad, ctx, kept, grads.sum, dy=grads.y
    ),
    plain=plain_norm,
    public=2,
)


def check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor | None, Tensor | None, float, bool],
    *,
    prefix: str = "",
    cast: Callable = common.autocast,
) -> tuple[Tensor, Tensor | None, int]:
    """Checks the operands of ``op``; returns x and residual, cast for autocast, and D.

    norm: weight, bias, eps, and whether it is an RMS norm.
    prefix: what stands before "weight" and "bias" in the op's names for them.
    cast: what autocast does to x and residual.
    """
    checks.tensor(op, "x", x)
    if residual is not None:
        checks.tensor(op, "residual", residual)
    x, residual = cast(x, residual)
    if residual is not None:
        checks.like(op, "residual", residual, "x", x)
    weight, bias, eps, _ = norm
    dim = x.shape[-1]
    checks.parameter(op, f"{prefix}weight", weight, (dim,), x.device)
    checks.parameter(op, f"{prefix}bias", bias, (dim,), x.device)
    checks.eps(op, eps)
    return x, residual, dim
