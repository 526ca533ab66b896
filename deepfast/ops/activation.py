"""The activation of a feed-forward block and the dropout after it, in one pass."""

from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.ops import common
from deepfast.ops.register import no_flops, register
from deepfast.reference.activation import KINDS


def compute(
    h: Tensor,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
    backend: str | None,
    inplace: bool = False,
) -> Tensor:
    """``dropout(act(h))``, shaped like h, without autograd. With ``inplace`` the result overwrites
    h where h's last dimension is contiguous."""
    _, launch = backends.choose("activation", backend, h.device.type, h.dtype, h.shape[-1])
    given, h = h, common.rows(h)
    out = h.view(given.shape) if inplace else common.empty_contiguous(given)
    launch.activation_forward(h, kind, dropout_p, seed, out.view(h.shape))
    return out


def compute_grad(
    dout: Tensor,
    saved: Tensor,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
    backend: str | None,
    inplace: bool = False,
) -> Tensor:
    """The gradient of h from dout, the gradient of `compute`'s result, shaped like dout.

    saved: for relu the result, which needs no seed; for gelu h. With ``inplace`` the gradient
    overwrites dout where dout's last dimension is contiguous.
    """
    _, launch = backends.choose("activation", backend, dout.device.type, dout.dtype, dout.shape[-1])
    given, dout = dout, common.rows(dout)
    dh = dout.view(given.shape) if inplace else common.empty_contiguous(given)
    launch.activation_backward(dout, common.rows(saved), kind, dropout_p, seed, dh.view(dout.shape))
    return dh


_activation_grad = register(
    "activation_grad(Tensor dout, Tensor saved, str kind, float dropout_p, Tensor? seed, "
    "str? backend) -> Tensor",
    lambda a: compute_grad(*a),
    fake=lambda a: a.dout.new_empty(a.dout.shape),
    flops=no_flops,
)


def _setup(ctx, a, results):
    # Relu saves its result and no mask: an element that is not 0 was neither cut off nor dropped.
    relu = a.kind == "relu"
    return {
        "saved": results.out if relu else a.h, "seed": None if relu else a.seed, "kind": a.kind,
        "dropout_p": a.dropout_p, "backend": a.backend,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    (dh,) = _activation_grad(dout=grads.out, **kept)
    return {"h": dh}


_activation = register(
    "activation(Tensor h, str kind, float dropout_p, Tensor? seed, str? backend) -> Tensor",
    lambda a: compute(*a),
    fake=lambda a: a.h.new_empty(a.h.shape),
    flops=no_flops,
    setup=_setup,
    backward=_backward,
)


def activation(
    h: Tensor,
    kind: str,
    *,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The activation of a feed-forward block and the dropout after it: ``dropout(act(h))``.

    relu(h) = max(h, 0); gelu(h) = h * Phi(h) with the exact normal distribution Phi. The result is
    computed in fp32 (fp64 for fp64 input) and rounded once. No mask is stored. Relu saves its
    result, which is 0 exactly where no gradient passes. Gelu saves h, and backward regenerates the
    mask from ``seed``.

    Args:
        h: (..., F), fp32, bf16, fp16 or fp64. Autocast does not cast it.
        kind: "relu" or "gelu".
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
    checks.probability("activation", dropout_p)
    p = dropout_p if training else 0.0
    seed = common.draw_seed("activation", seed, h.device) if p > 0 else None
    return _activation(h, kind, p, seed, backend)[0]
