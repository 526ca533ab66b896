"""The sum ``residual + dropout(x)`` where no fused norm follows it."""

from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op
from deepfast.reference.dropout import add_dropout as reference

_NO_NORMS = {"norm_source": False, "source_eps": 0.0, "source_rms": False}
_NO_NORMS |= {"out_eps": 0.0, "out_rms": False}


def _compute(a, x: Tensor, residual: Tensor | None) -> Tensor:
    """By the launch of a boundary, which stores the sum as its state and here mixes no state."""
    x, out = common.rows(x), common.empty_contiguous(x)
    states, weight = common.rows(out).unsqueeze(0), x.new_empty(1, 1, dtype=compute_dtype(x.dtype))
    given = {"residual": common.rows(residual), "dropout_p": a.dropout_p, "seed": a.seed}
    common.launches("boundary", a.backend, x, x.shape[-1]).boundary_forward(
        branch=x, **given, states=states, k=0, near=[], weight=weight, **_NO_NORMS
    )
    return out


_add_dropout_grad = Op(
    "add_dropout_grad(Tensor dout, float dropout_p, Tensor? seed, str? backend) -> Tensor",
    lambda a: _compute(a, a.dout, None),
)


def _backward(op, ctx, kept, grads) -> dict[str, Tensor | None]:
    dx = _add_dropout_grad(grads.out, **kept)[0] if ctx.needs.x else None
    return {"x": dx, "residual": grads.out}


add_dropout_op = Op(
    "add_dropout(Tensor x, Tensor? residual, float dropout_p, Tensor? seed, str? backend) "
    "-> Tensor",
    lambda a: _compute(a, a.x, a.residual),
    grad=_add_dropout_grad,
    backward=_backward,
    plain=lambda a: reference(a.x, a.residual, a.dropout_p, a.seed),
)


def add_dropout(
    op: str, x: Tensor, residual: Tensor | None, dropout_p: float, seed, backend: str | None
) -> Tensor:
    """``residual + dropout(x)``, with the bits of the sum of `add_layer_norm`; errors begin with
    ``op``."""
    x, residual = common.promoted(x, residual)
    if residual is not None:
        checks.like(op, "residual", residual, "x", x)
    if dropout_p == 0:
        return x if residual is None else x + residual
    seed = common.draw_seed(op, seed, x.device)
    return add_dropout_op(x, residual, dropout_p, seed, backend)[0]
