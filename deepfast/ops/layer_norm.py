"""Layer and RMS normalisation, with the dropout and residual add before it in the same pass."""

from torch import Tensor

from deepfast import checks
from deepfast.ops import common
from deepfast.ops.norm import check
from deepfast.ops.norm import layer_norm as registered


def normalise(op: str, x, residual, norm: tuple, dropout_p: float, seed, backend):
    """`layer_norm` or `rms_norm`; errors begin with ``op``.

    norm: weight, bias, eps, and whether it is an RMS norm.
    """
    common.reverse_mode_only(op)
    x, residual, _ = check(op, x, residual, norm, dropout_p, cast=common.alike)
    seed = common.draw_seed(op, seed, x.device) if dropout_p > 0 else None
    y, total = registered(x, residual, *norm, dropout_p, seed, backend)
    return y if residual is None else (y, total)


def _probability(op: str, dropout_p: float, training: bool) -> float:
    """The probability of dropout: 0 outside of training."""
    checks.probability(op, dropout_p)
    checks.flag(op, training=training)
    return dropout_p if training else 0.0


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation of ``s = residual + dropout(x)`` over the last dimension.

    ``y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias`` with the biased variance, computed
    in fp32 (fp64 for fp64 input). The kernel reads each operand once and writes each result once.
    The dropout mask is not stored: backward regenerates it from ``seed``.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64; y and s have its dtype, under autocast too.
        weight, bias: (D,), any of these dtypes, or None.
        eps: added to the variance.
        residual: shaped like x. With a residual the sum s is returned too. Under autocast x and
            residual may have different dtypes; y and s are then fp32.
        dropout_p: probability that an element of x becomes 0, while ``training``.
        training: whether dropout applies.
        seed: seed of the dropout mask, an int or a 0-dim int64 tensor on x's device; None draws one
            from torch's generator of that device.
        backend: see `deepfast.backend`.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    p = _probability("layer_norm", dropout_p, training)
    return normalise("layer_norm", x, residual, (weight, bias, eps, False), p, seed, backend)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation of ``s = residual + dropout(x)`` over the last dimension.

    ``y = s / sqrt(mean(s^2) + eps) * weight``. Everything else is as in `layer_norm`, whose kernels
    it shares.

    Args:
        x: (..., D), fp32, bf16, fp16 or fp64; y and s have its dtype, under autocast too.
        weight: (D,), any of these dtypes, or None.
        eps: added to the mean square.
        residual, dropout_p, training, seed, backend: as in `layer_norm`. `deepfast.backend` lists
            the op as ``layer_norm``.

    Returns:
        y, shaped like x; with ``residual``, (y, s).

    Raises:
        TypeError, ValueError, BackendError, RuntimeError, NotImplementedError: as `layer_norm`.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    p = _probability("rms_norm", dropout_p, training)
    return normalise("rms_norm", x, residual, (weight, None, eps, True), p, seed, backend)
