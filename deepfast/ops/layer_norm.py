"""Layer and RMS normalisation; ``add_`` before the name: of a sum, which the same pass computes."""

from torch import Tensor

from deepfast import checks
from deepfast.ops import common
from deepfast.ops.norm import check
from deepfast.ops.norm import layer_norm as registered


def normalise(
    op: str, x, residual, norm: tuple, dropout_p: float, seed, backend
) -> tuple[Tensor, Tensor]:
    """The norm of ``s = residual + dropout(x)``, and s; errors begin with ``op``.

    norm: weight, bias, eps, and whether it is an RMS norm.
    """
    common.reverse_mode_only(op)
    x, residual = check(op, x, residual, norm, cast=common.promoted)
    seed = common.draw_seed(op, seed, x.device) if dropout_p > 0 else None
    return registered(x, residual, *norm, dropout_p, seed, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Layer normalisation over the last dimension.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` with the biased variance, computed
    in fp32 (fp64 for fp64 input). The kernel reads each operand once and writes each result once.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64.
        weight, bias: (D,), any of these dtypes, or None.
        eps: added to the variance.
        backend: see `deepfast.backend`.

    Returns:
        y, shaped like x, in its dtype, under autocast too.

    Raises: as every op, see `deepfast.ops`.

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    return normalise("layer_norm", x, None, (weight, bias, eps, False), 0.0, None, backend)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`layer_norm` of ``s = residual + dropout(x)``, in one pass.

    The dropout mask is not stored: backward regenerates it from ``seed``.

    Args:
        x, residual: (..., D), fp32, bf16, fp16 or fp64. Under autocast they may have different
            dtypes; y and s are then fp32.
        weight, bias, eps, backend: as in `layer_norm`.
        dropout_p: probability that an element of x becomes 0, while ``training``.
        training: whether dropout applies.
        seed: seed of the dropout mask, an int or a 0-dim int64 tensor on x's device; None draws one
            from torch's generator of that device.

    Returns:
        y and s, shaped like x.

    Raises: as every op, see `deepfast.ops`.
    """
    op = "add_layer_norm"
    checks.tensor(op, "residual", residual)
    p = common.probability(op, dropout_p, training)
    return normalise(op, x, residual, (weight, bias, eps, False), p, seed, backend)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, backend: str | None = None
) -> Tensor:
    """RMS normalisation over the last dimension: ``y = x / sqrt(mean(x^2) + eps) * weight``.

    Everything else is as in `layer_norm`, whose kernels it shares.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64.
        weight: (D,), any of these dtypes, or None.
        eps: added to the mean square.
        backend: see `deepfast.backend`, which lists the op as ``layer_norm``.

    Returns:
        y, shaped like x, in its dtype, under autocast too.

    Raises: as every op, see `deepfast.ops`.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return normalise("rms_norm", x, None, (weight, None, eps, True), 0.0, None, backend)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of ``s = residual + dropout(x)``, in one pass; arguments as in `add_layer_norm`.

    Returns:
        y and s, shaped like x.

    Raises: as every op, see `deepfast.ops`.
    """
    op = "add_rms_norm"
    checks.tensor(op, "residual", residual)
    p = common.probability(op, dropout_p, training)
    return normalise(op, x, residual, (weight, None, eps, True), p, seed, backend)
