"""The activation of a feed-forward block, with the bias before it and the dropout after it."""

from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op
from deepfast.reference.activation import KINDS
from deepfast.reference.activation import activation as reference


def compute(a, inplace: bool = False) -> Tensor:
    """``dropout(act(h + bias))``, shaped like h, without autograd. With ``inplace`` the result
    overwrites h where h's last dimension is contiguous.

    a: operands of `activation_op`.
    """
    h = common.rows(a.h)
    out = h.view(a.h.shape) if inplace else common.empty_contiguous(a.h)
    bias, rows = common.parameter(a.bias, h.dtype), common.rows(out)
    common.launches("activation", a.backend, h, h.shape[-1]).activation_forward(
        h=h, bias=bias, kind=a.kind, dropout_p=a.dropout_p, seed=a.seed, out=rows
    )
    return out


def compute_grad(a, inplace: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradients of h, shaped like dout, and of the bias from that of `compute`'s result.

    With ``inplace`` the gradient of h overwrites dout where dout's last dimension is contiguous.

    a: operands of `activation_grad`. saved: for relu the result, which needs no seed and no bias;
        for gelu h.
    """
    dout, saved, p = common.rows(a.dout), common.rows(a.saved), a.dropout_p
    dh = dout.view(a.dout.shape) if inplace else common.empty_contiguous(a.dout)
    dtype = compute_dtype(dout.dtype)
    dbias = dout.new_empty(dout.shape[-1], dtype=dtype) if a.wants[1] else None
    bias, rows = common.parameter(a.bias, dout.dtype), common.rows(dh)
    common.launches("activation", a.backend, dout, dout.shape[-1]).activation_backward(
        dout=dout,
        saved=saved,
        bias=bias,
        kind=a.kind,
        dropout_p=p,
        seed=a.seed,
        dh=rows,
        dbias=dbias,
    )
    return dh, dbias


activation_grad = Op(
    "activation_grad(Tensor dout, Tensor saved, Tensor? bias, str kind, float dropout_p, "
    "Tensor? seed, bool[] wants, str? backend) -> (Tensor dh, Tensor dbias)",
    compute_grad,
)


def _setup(ctx, a, results) -> dict:
    if a.kind == "relu":
        # An element of the result that is not 0 was neither cut off nor dropped.
        return {"saved": results.out, "bias": None, "seed": None}
    return {"saved": a.h, "bias": common.detached(a.bias)}


activation_op = Op(
    "activation(Tensor h, Tensor? bias, str kind, float dropout_p, Tensor? seed, str? backend) "
    "-> Tensor",
    compute,
    grad=activation_grad,
    setup=_setup,
    plain=lambda a: reference(a.h, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed),
)


def activation(
    h: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The activation of a feed-forward block and the dropout after it: ``dropout(act(h + bias))``.

    relu(x) = max(x, 0); gelu(x) = x * Phi(x) with the exact normal distribution Phi. The result is
    computed in fp32 (fp64 for fp64 input) and rounded once. No mask is stored. Relu saves its
    result, which is 0 exactly where no gradient passes. Gelu saves h, and backward regenerates the
    mask from ``seed``. The bias of a linear map before the activation belongs here: the pass that
    computes the gradient of h also sums it for the bias, in a fixed order.

    Args:
        h: (..., F), fp32, bf16, fp16 or fp64. Autocast does not cast it.
        activation: "relu" or "gelu".
        bias: (F,), any of these dtypes, or None.
        dropout_p: probability that an element becomes 0, while ``training``.
        training: whether dropout applies.
        seed: seed of the dropout mask, an int or a 0-dim int64 tensor on h's device; None draws one
            from torch's generator of that device.
        backend: see `deepfast.backend`.

    Returns:
        Shaped like h, in its dtype.

    Raises: as every op, see `deepfast.ops`.

    Source: Hendrycks, Gimpel, Gaussian Error Linear Units (GELUs), 2016.
    """
    checks.tensor("activation", "h", h)
    checks.choice("activation", KINDS, activation=activation)
    checks.parameter("activation", "bias", bias, (h.shape[-1],), h.device)
    p = common.probability("activation", dropout_p, training)
    seed = common.draw_seed("activation", seed, h.device) if p > 0 else None
    return activation_op(h, bias, activation, p, seed, backend)[0]
