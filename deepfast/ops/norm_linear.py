"""Layer normalisation and a linear map as one op, which saves no normalised copy for backward."""

import math

import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common, norm
from deepfast.ops.layer_norm import probability
from deepfast.ops.register import register


def _forward(a):
    n, s, mean, rstd = norm.compute(a)
    return F.linear(n, a.weight, a.bias), s, mean, rstd


def _fake(a):
    _, s, mean, rstd = norm.empty_results(a)
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0])), s, mean, rstd


def _empty_products(a, make):
    """dweight and dbias, each None where it is not wanted."""
    shape, (*_, want_weight, want_bias) = a.weight.shape, a.wants
    return make(shape) if want_weight else None, make(shape[0]) if want_bias else None


def _grad_forward(a):
    *_, want_weight, want_bias = a.wants
    if a.dout is None:
        return *norm.compute_grads(a, None), *_empty_products(a, a.weight.new_zeros)
    n = norm.recomputed(a) if want_weight else None
    products = common.linear_grads(a.dout, n, want_weight, want_bias)
    return *norm.compute_grads(a, a.dout.matmul(a.weight)), *products


_norm_linear_grad = register(
    "norm_linear_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor weight, Tensor? mean, Tensor rstd, float eps, bool rms, "
    "float dropout_p, Tensor? seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight, Tensor dbias)",
    _grad_forward,
    fake=lambda a: (*norm.empty_grads(a), *_empty_products(a, a.weight.new_empty)),
    flops=lambda a: 4 * math.prod(a.sum) * a.weight[0],
)


def _plain(a):
    n, s = norm.plain_norm(a)
    return F.linear(n, a.weight, a.bias), s


_norm_linear = register(
    "norm_linear(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor weight, Tensor? bias, float eps, bool rms, float dropout_p, Tensor? seed, "
    "str? backend) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    fake=_fake,
    flops=lambda a: 2 * math.prod(a.x) * a.weight[0],
    cast=("x", "residual", "weight", "bias"),
    setup=lambda ctx, a, results: norm.kept_to_recompute(ctx, a, results) | {"weight": a.weight},
    backward=lambda ctx, kept, grads: norm.norm_gradients(
        _norm_linear_grad, ctx, kept, grads.sum, dout=grads.out
    ),
    plain=_plain,
    public=2,
)


def _run(
    op: str, x, residual, norm_type: str, parameters: tuple, linear: tuple, p: float, seed, backend
):
    """out and s of `norm_linear` and `add_norm_linear`; errors begin with ``op``."""
    checks.choice(op, norm.TYPES, norm_type=norm_type)
    parameters = *parameters, norm_type == "rms"
    x, residual, dim = norm.check(op, x, residual, parameters, prefix="norm_")
    weight, bias = common.linear_operands(op, x, dim, ("weight", "N", "bias"), *linear)
    norm_weight, norm_bias, eps, rms = parameters
    return _norm_linear(
        x, residual, norm_weight, norm_bias, weight, bias, eps, rms, p, seed, backend
    )


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_type: str = "layer",
    backend: str | None = None,
) -> Tensor:
    """``LN(x) weight^T + bias``.

    Autograd saves x and not LN(x). Backward recomputes LN(x) for the weight's gradient, which costs
    one pass over x. The matrix products are torch's.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias: (D,), parameters of the norm, or None.
        weight: (N, D), in x's dtype.
        bias: (N,), or None.
        eps: added to the variance.
        norm_type: "layer", or "rms" for `rms_norm`.
        backend: backend of the norm, see `deepfast.backend`.

    Returns:
        (..., N).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016; the recomputation as in Liger-Kernel's
    and Apex's memory-efficient layer-norms.
    """
    parameters, linear = (norm_weight, norm_bias, eps), (weight, bias)
    return _run("norm_linear", x, None, norm_type, parameters, linear, 0.0, None, backend)[0]


def add_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_type: str = "layer",
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of ``s = residual + dropout(x)``; dropout as in `add_layer_norm`.

    Args:
        x, residual: (..., D), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        norm_weight, norm_bias, weight, bias, eps, norm_type, backend: as in `norm_linear`.
        dropout_p, training, seed: as in `add_layer_norm`.

    Returns:
        (..., N), and s, shaped like x.

    Raises:
        TypeError, ValueError, BackendError, RuntimeError, NotImplementedError: as `norm_linear`.
    """
    op = "add_norm_linear"
    checks.tensor(op, "residual", residual)
    p = probability(op, dropout_p, training)
    seed = common.draw_seed(op, seed, x.device) if p > 0 else None
    parameters, linear = (norm_weight, norm_bias, eps), (weight, bias)
    return _run(op, x, residual, norm_type, parameters, linear, p, seed, backend)
