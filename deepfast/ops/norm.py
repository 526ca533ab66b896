"""The norm of ``residual + dropout(x)`` with which `layer_norm`, `norm_linear` and `feed_forward`
begin: forward, backward and checks on the operands that the three ops share."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op, gradients
from deepfast.reference.layer_norm import layer_norm as reference

TYPES = ("layer", "rms")
"""`layer_norm`, and `rms_norm` without a bias."""


def compute(a):
    """y, sum, mean and rstd of an op that begins with a norm of ``residual + dropout(x)``, without
    autograd. sum is None where it equals x, and mean with ``rms``.

    a: the op's operands; of the norm they are those of the op layer_norm below.
    """
    x = common.rows(a.x)
    # Results are allocated in x's shape: the caller could not modify a view in place.
    y = common.empty_contiguous(a.x)
    sum = torch.empty_like(y) if _changed(a) else None
    rstd = y.new_empty(y.numel() // y.shape[-1], dtype=compute_dtype(y.dtype))
    mean = None if a.rms else torch.empty_like(rstd)
    # One by one, here and in backward: a dictionary would cost a small call 5% of its time.
    common.launches("layer_norm", a.backend, x, x.shape[-1]).layer_norm_forward(
        x=x,
        residual=common.rows(a.residual),
        weight=common.parameter(a.norm_weight, x.dtype),
        bias=common.parameter(a.norm_bias, x.dtype),
        eps=a.eps,
        rms=a.rms,
        dropout_p=a.dropout_p,
        seed=a.seed,
        sum=common.rows(sum),
        y=common.rows(y),
        mean=mean,
        rstd=rstd,
    )
    return y, sum, mean, rstd


def _changed(a) -> bool:
    """Whether the sum is not x itself."""
    return a.residual is not None or a.dropout_p > 0


def recomputed(a):
    """y again, from the sum and with the same bits as in forward."""
    norm = a.norm_weight, a.norm_bias, a.eps, a.rms
    return compute(layer_norm.operands(a.sum, None, *norm, 0.0, None, a.backend))[0]


def compute_grads(a, dy):
    """dx, dresidual, dnorm_weight and dnorm_bias, each None where its entry of ``wants`` is False.

    a: the operands of the op's gradient, see `layer_norm_grad` below.
    """
    sum, (want_x, want_residual, want_weight, want_bias, *_) = common.rows(a.sum), a.wants
    dx = common.empty_contiguous(a.sum) if want_x else None
    dresidual = common.empty_contiguous(a.sum) if want_residual else None
    dweight = a.rstd.new_empty(sum.shape[-1]) if want_weight else None
    dbias = a.rstd.new_empty(sum.shape[-1]) if want_bias else None
    common.launches("layer_norm", a.backend, sum, sum.shape[-1]).layer_norm_backward(
        sum=sum,
        dy=torch.zeros_like(sum) if dy is None else common.rows(dy),
        dsum=common.rows(a.dsum),
        weight=common.parameter(a.norm_weight, sum.dtype),
        rms=a.rms,
        mean=None if a.rms else a.mean,
        rstd=a.rstd,
        dropout_p=a.dropout_p,
        seed=a.seed,
        dx=common.rows(dx),
        dresidual=common.rows(dresidual),
        dweight=dweight,
        dbias=dbias,
    )
    return dx, dresidual, dweight, dbias


_layer_norm_grad = Op(
    "layer_norm_grad(Tensor sum, Tensor? dy, Tensor? dsum, Tensor? norm_weight, bool rms, "
    "Tensor? mean, Tensor rstd, float dropout_p, Tensor? seed, bool[] wants, str? backend) "
    "-> (Tensor dx, Tensor dresidual, Tensor dnorm_weight, Tensor dnorm_bias)",
    lambda a: compute_grads(a, a.dy),
)


def setup(ctx, a, results) -> dict:
    """`Op.setup` of an op that begins with a norm. Without residual and dropout backward normalises
    x itself, and a gradient of the sum does not count."""
    ctx.uncounted = [] if _changed(a) else [results._fields.index("sum")]
    return {} if _changed(a) else {"sum": a.x}


def setup_to_recompute(ctx, a, results) -> dict:
    """The same where backward also recomputes y."""
    parameters = {name: common.detached(getattr(a, name)) for name in ("norm_weight", "norm_bias")}
    return setup(ctx, a, results) | parameters


def backward(op: Op, ctx, kept: dict, grads) -> dict[str, Tensor]:
    """`Op.backward` of an op that begins with a norm."""
    grads = list(grads)
    for place in ctx.uncounted:
        grads[place] = None
    if grads[0] is None and all(grad is None for grad in grads):
        return {}
    # Without dropout x and residual have the same gradient, and get the same tensor object. Two
    # views of it would become the .grad of two leaves, which would then share memory.
    shared = kept["dropout_p"] == 0 and ctx.needs.residual
    if shared:
        ctx.needs = ctx.needs._replace(x=True, residual=False)
    of_operands = gradients(op, ctx, kept, grads)
    if shared:
        of_operands["residual"] = of_operands["x"]
    return of_operands


def plain_norm(a) -> tuple[Tensor, Tensor]:
    """y and sum of an op that begins with a norm, in plain torch."""
    dropped = {"residual": a.residual, "dropout_p": a.dropout_p, "seed": a.seed}
    return reference(a.x, a.norm_weight, a.norm_bias, a.eps, rms=a.rms, **dropped)


layer_norm = Op(
    "layer_norm(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, float eps, "
    "bool rms, float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    compute,
    grad=_layer_norm_grad,
    setup=setup,
    backward=backward,
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
) -> tuple[Tensor, Tensor | None]:
    """Checks the operands of ``op``; returns x and residual, cast for autocast.

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
    checks.parameter(op, f"{prefix}weight", weight, (x.shape[-1],), x.device)
    checks.parameter(op, f"{prefix}bias", bias, (x.shape[-1],), x.device)
    checks.eps(op, eps)
    return x, residual
