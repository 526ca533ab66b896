"""The activation of a feed-forward block, with the bias before it and the dropout after it."""

from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, no_flops, register
from deepfast.reference.activation import KINDS
from deepfast.reference.activation import activation as reference


def compute(
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
    backend: str | None,
    inplace: bool = False,
) -> Tensor:
    """``dropout(act(h + bias))``, shaped like h, without autograd. With ``inplace`` the result
    overwrites h where h's last dimension is contiguous."""
    _, launch = backends.choose("activation", backend, h.device, h.dtype, h.shape[-1])
    given, h = h, common.rows(h)
    out = h.view(given.shape) if inplace else common.empty_contiguous(given)
    bias = common.parameter(bias, h.dtype)
    launch.activation_forward(
        h=h, bias=bias, kind=kind, dropout_p=dropout_p, seed=seed, out=out.view(h.shape)
    )
    return out


def empty_bias_grad(dout: Tensor, wanted: bool) -> Tensor:
    """For the gradient of the bias: (F,), or without elements where it is not wanted."""
    return dout.new_empty(dout.shape[-1] if wanted else 0, dtype=compute_dtype(dout.dtype))


def compute_grad(
    dout: Tensor,
    saved: Tensor,
    bias: Tensor | None,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
    want_bias: bool,
    backend: str | None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of h and of the bias from dout, the gradient of `compute`'s result.

    That of h is shaped like dout. saved: for relu the result, which needs no seed and no bias; for
    gelu h. With ``inplace`` the gradient of h overwrites dout where dout's last dimension is
    contiguous.
    """
    _, launch = backends.choose("activation", backend, dout.device, dout.dtype, dout.shape[-1])
    given, dout = dout, common.rows(dout)
    dh = dout.view(given.shape) if inplace else common.empty_contiguous(given)
    dbias, bias = empty_bias_grad(dout, want_bias), common.parameter(bias, dout.dtype)
    launch.activation_backward(
        dout=dout, saved=common.rows(saved), bias=bias, kind=kind, dropout_p=dropout_p, seed=seed,
        dh=dh.view(dout.shape), dbias=dbias if want_bias else None,
    )  # fmt: skip
    return dh, dbias


_activation_grad = register(
    "activation_grad(Tensor dout, Tensor saved, Tensor? bias, str kind, float dropout_p, "
    "Tensor? seed, bool[] wants, str? backend) -> (Tensor dh, Tensor dbias)",
    lambda a: compute_grad(*a._replace(wants=a.wants[1])),
    fake=lambda a: (a.dout.new_empty(a.dout.shape), empty_bias_grad(a.dout, a.wants[1])),
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


def _backward(ctx, kept, grads):
    return gradients(_activation_grad, ctx, kept, dout=grads.out)


_activation = register(
    "activation(Tensor h, Tensor? bias, str kind, float dropout_p, Tensor? seed, str? backend) "
    "-> Tensor",
    lambda a: compute(*a),
    fake=lambda a: a.h.new_empty(a.h.shape),
    flops=no_flops,
    setup=_setup,
    backward=_backward,
    plain=lambda a: reference(a.h, a.kind, bias=a.bias, dropout_p=a.dropout_p, seed=a.seed),
)


def activation(
    h: Tensor,
    kind: str,
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
        kind: "relu" or "gelu".
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
    checks.choice("activation", KINDS, kind=kind)
    checks.parameter("activation", "bias", bias, (h.shape[-1],), h.device)
    checks.probability("activation", dropout_p)
    checks.flag("activation", training=training)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("activation", seed, h.device) if p > 0 else None
    return _activation(h, bias, kind, p, seed, backend)[0]
