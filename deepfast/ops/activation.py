"""The activation of a feed-forward block, with the bias before it and the dropout after it."""

from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, no_flops, register
from deepfast.reference.activation import KINDS
from deepfast.reference.activation import activation as reference


def compute(a, inplace: bool = False) -> Tensor:
    """``dropout(act(h + bias))``, shaped like h, without autograd. With ``inplace`` the result
    overwrites h where h's last dimension is contiguous.

    a: operands of `activation_op`.
    """
    _, launch = backends.choose("activation", a.backend, a.h.device, a.h.dtype, a.h.shape[-1])
    h = common.rows(a.h)
    out = h.view(a.h.shape) if inplace else common.empty_contiguous(a.h)
    launch.activation_forward(
        h=h, bias=common.parameter(a.bias, h.dtype), kind=a.kind, dropout_p=a.dropout_p,
        seed=a.seed, out=common.rows(out),
    )  # fmt: skip
    return out


def _empty_bias_grad(a) -> Tensor | None:
    """(F,), or None where it is not wanted."""
    if not a.wants[1]:
        return None
    return a.dout.new_empty(a.dout.shape[-1], dtype=compute_dtype(a.dout.dtype))


def compute_grad(a, inplace: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradients of h, shaped like dout, and of the bias from that of `compute`'s result.

    With ``inplace`` the gradient of h overwrites dout where dout's last dimension is contiguous.

    a: operands of `activation_grad`. saved: for relu the result, which needs no seed and no bias;
        for gelu h.
    """
    dout = common.rows(a.dout)
    _, launch = backends.choose("activation", a.backend, dout.device, dout.dtype, dout.shape[-1])
    dh = dout.view(a.dout.shape) if inplace else common.empty_contiguous(a.dout)
    dbias = _empty_bias_grad(a)
    launch.activation_backward(
        dout=dout, saved=common.rows(a.saved), bias=common.parameter(a.bias, dout.dtype),
        kind=a.kind, dropout_p=a.dropout_p, seed=a.seed, dh=common.rows(dh),
        dbias=dbias,
    )  # fmt: skip
    return dh, dbias


activation_grad = register(
    "activation_grad(Tensor dout, Tensor saved, Tensor? bias, str kind, float dropout_p, "
    "Tensor? seed, bool[] wants, str? backend) -> (Tensor dh, Tensor dbias)",
    compute_grad,
    fake=lambda a: (a.dout.new_empty(a.dout.shape), _empty_bias_grad(a)),
    flops=no_flops,
)


def _setup(ctx, a, results):
    # Relu saves its result and no mask: an element that is not 0 was neither cut off nor dropped.
    relu = a.kind == "relu"
    return {
        "saved": results.out if relu else a.h, "bias": None if relu else common.detached(a.bias),
        "seed": None if relu else a.seed, "kind": a.kind, "dropout_p": a.dropout_p,
        "backend": a.backend,
    }  # fmt: skip


activation_op = register(
    "activation(Tensor h, Tensor? bias, str kind, float dropout_p, Tensor? seed, str? backend) "
    "-> Tensor",
    compute,
    fake=lambda a: a.h.new_empty(a.h.shape),
    flops=no_flops,
    setup=_setup,
    backward=lambda ctx, kept, grads: gradients(activation_grad, ctx, kept, dout=grads.out),
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

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Hendrycks, Gimpel, Gaussian Error Linear Units (GELUs), 2016.
    """
    checks.tensor("activation", "h", h)
    checks.choice("activation", KINDS, activation=activation)
    checks.parameter("activation", "bias", bias, (h.shape[-1],), h.device)
    checks.probability("activation", dropout_p)
    checks.flag("activation", training=training)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("activation", seed, h.device) if p > 0 else None
    return activation_op(h, bias, activation, p, seed, backend)[0]
