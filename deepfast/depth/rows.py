"""What belongs to one row or one block of rows of a `deepfast.depth.depth_pass.DepthPass`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.ops.common import empty_slots


class OutNorm(NamedTuple):
    """The norm applied to a boundary's output: weight and bias, each (D,) or None, and eps; ``rms``
    makes it an RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


class RowNorm(NamedTuple):
    """An `OutNorm` in the compute dtype, and its statistics (T,). An RMS norm has no mean, and rstd
    is None where there is no norm."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    rms: bool = False
    mean: Tensor | None = None
    rstd: Tensor | None = None


NO_NORM = RowNorm()


Pair = tuple[Tensor | None, Tensor | None]


class RowGrads(NamedTuple):
    """What the kernel of a boundary reads in backward, and what it writes: (T, D) each, or None."""

    dx: Tensor | None
    """Gradients of x and, below, of the norm's result. The kernel adds them to g_k."""
    dout: Tensor | None
    near: list[int]
    """The rows of the block whose gradients it pulls."""
    pulled: Tensor | None
    """Q_k, from the rows after the block."""
    dbranch: Tensor | None
    """The kernel writes this and everything below."""
    dresidual: Tensor | None
    dnorm_weight: Tensor | None
    """(D,), of the norm behind the row."""
    dnorm_bias: Tensor | None


def numbers_of_rows(like: Tensor, rows: int, tokens: int) -> Sequence[Tensor]:
    """Room for a number of each token, (T,) for each row, in the dtype of ``like``."""
    if isinstance(tokens, torch.SymInt):
        # Inductor of torch 2.13 loses the offset of a view that a launch writes where the offset is
        # a multiple of a size that it does not know.
        return [like.new_empty(tokens) for _ in range(rows)]
    return like.new_empty(rows, tokens).unbind(0)


class BlockSums:
    """The sums of one block of rows or states, in a buffer that the next block uses again."""

    sums: Tensor | None = None
    """(B, T, D), in the compute dtype: a sum is rounded when its row is, and not before."""
    of: Sequence[Tensor | None] = ()
    """Each sum (T, D); None where the block has none."""
    start = -1
    """The first row or state; -1 for no block."""

    def open(self, block: int, like: Tensor) -> Tensor:
        """The buffer, for states like ``like`` (T, D)."""
        if self.sums is None:
            self.sums = empty_slots(block, like, compute_dtype(like.dtype))
        self.of = self.sums.unbind(0)
        return self.sums

    def skip(self, block: int) -> None:
        """This block has no sums."""
        self.of = (None,) * block

    def clear(self) -> None:
        self.sums, self.of, self.start = None, (), -1
