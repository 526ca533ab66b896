"""Layer normalisation and a linear map as one op, which saves no normalised copy for backward."""

import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops import common, norm
from deepfast.ops.register import Op


def _forward(a):
    n, s, mean, rstd = norm.compute(a)
    return F.linear(n, a.weight, a.bias), s, mean, rstd


def _grad_forward(a):
    *_, want_weight, want_bias = a.wants
    dout = common.zeros_if_missing(a.dout, a.sum, a.weight.shape[0])
    n = norm.recomputed(a) if want_weight else None
    products = common.linear_grads(dout, n, want_weight, want_bias)
    return *norm.compute_grads(a, dout.matmul(a.weight)), *products


_norm_linear_grad = Op(
    "norm_linear_grad(Tensor sum, Tensor? dout, Tensor? dsum, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor weight, Tensor? mean, Tensor rstd, float eps, bool rms, "
    "float dropout_p, Tensor? seed, bool[] wants, str? backend) -> (Tensor dx, Tensor dresidual, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight, Tensor dbias)",
    _grad_forward,
    flops=lambda a: 4 * a.sum.numel() * a.weight.shape[0],
)


def _plain(a):
    n, s = norm.plain_norm(a)
    return F.linear(n, a.weight, a.bias), s


_norm_linear = Op(
    "norm_linear(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor weight, Tensor? bias, float eps, bool rms, float dropout_p, Tensor? seed, "
    "str? backend) "
    "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    flops=lambda a: 2 * a.x.numel() * a.weight.shape[0],
    cast=("x", "residual", "weight", "bias"),
    grad=_norm_linear_grad,
    setup=norm.setup_to_recompute,
    backward=norm.backward,
    plain=_plain,
    public=2,
)


def _checked(op: str, x, residual, parameters: tuple, linear: tuple) -> tuple:
    """The first 8 operands of the registered op; errors begin with ``op``.

    parameters: weight and bias of the norm, eps and the type of the norm.
    linear: weight and bias of the linear map.
    """
    norm_weight, norm_bias, eps, norm_type = parameters
    checks.choice(op, norm.TYPES, norm_type=norm_type)
    parameters = norm_weight, norm_bias, eps, norm_type == "rms"
    x, residual = norm.check(op, x, residual, parameters, prefix="norm_")
    weight, bias = common.linear_operands(op, x, ("N", x.shape[-1]), *linear)
    return x, residual, norm_weight, norm_bias, weight, bias, *parameters[2:]


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

    Raises: as every op, see `deepfast.ops`.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016; the recomputation as in Liger-Kernel's
    and Apex's memory-efficient layer-norms.
    """
    norm_operands = norm_weight, norm_bias, eps, norm_type
    given = _checked("norm_linear", x, None, norm_operands, (weight, bias))
    return _norm_linear(*given, 0.0, None, backend)[0]


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

    Raises: as every op, see `deepfast.ops`.
    """
    op, norm_operands = "add_norm_linear", (norm_weight, norm_bias, eps, norm_type)
    checks.tensor(op, "residual", residual)
    p = common.probability(op, dropout_p, training)
    given = _checked(op, x, residual, norm_operands, (weight, bias))
    seed = common.draw_seed(op, seed, given[0].device) if p > 0 else None
    return _norm_linear(*given, p, seed, backend)
