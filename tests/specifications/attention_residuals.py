"""Attention residuals, as published: Kimi Team, Attention Residuals, arXiv 2603.15031, 2026.

v_0 is the embedding. v_k is what layer k adds to its input: its output without the residual. w_l is
the query of row l. Rows count from 0: row l reads v_0 .. v_l and feeds layer l + 1; row L is the
output of the stack.
"""

from collections.abc import Sequence

from torch import Tensor

from deepfast.reference.layer_norm import rms_norm


def attend(values: Sequence[Tensor], w: Tensor, eps: float = 1e-6) -> Tensor:
    """``sum_i phi(w, v_i) v_i / sum_i phi(w, v_i)`` with ``phi(w, v) = exp(w . RMSNorm(v))``."""
    phi = [(rms_norm(v, eps=eps)[0] * w).sum(-1, keepdim=True).exp() for v in values]
    return sum(p * v for p, v in zip(phi, values, strict=True)) / sum(phi)


def full(v: Sequence[Tensor], w: Tensor, row: int, eps: float = 1e-6) -> Tensor:
    """Row ``row``: attention over v_0 .. v_row. w: (L + 1, D)."""
    return attend(v[: row + 1], w[row], eps)


def block(v: Sequence[Tensor], w: Tensor, row: int, size: int, eps: float = 1e-6) -> Tensor:
    """Row ``row`` in blocks of ``size`` layers.

    Attention over v_0, the sum of each finished block, and the sum of the unfinished block so far.
    """
    done = row // size
    values = [v[0], *(sum(v[b * size + 1 : (b + 1) * size + 1]) for b in range(done))]
    if row % size:
        values.append(sum(v[done * size + 1 : row + 1]))
    return attend(values, w[row], eps)
