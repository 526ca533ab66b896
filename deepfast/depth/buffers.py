"""Buffers of a pass that belong to a block of rows, or have a number for each row."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepfast.depth.schedule import FarPass, one_for_all
from deepfast.dtypes import compute_dtype
from deepfast.ops.common import empty_slots


class BlockSums:
    """The sums of one block of rows or states, in a buffer that the next block uses again."""

    sums: Tensor | None = None
    """(B, T, D), in the compute dtype: a sum is rounded when its row is, and not before."""
    start = -1
    """The first row or state; -1 for no block."""
    of_target: Sequence[Tensor | None] = ()
    """Each sum (T, D); None where the block has none."""

    def passes_into(
        self, block: range, size: int, passes: Sequence[FarPass], like: Tensor
    ) -> Iterator:
        """Opens the buffer for the sums of ``block``. Yields each pass over what lies outside it,
        and the operands, by name, that receive its sums.

        size: of the largest block. like: a state, (T, D).
        """
        self.start = block.start
        if not passes:
            self.of_target = (None,) * size
            return
        if self.sums is None:
            self.sums = empty_slots(size, like, compute_dtype(like.dtype))
        self.of_target = self.sums.unbind(0)
        add = not one_for_all(passes, len(block))
        if add:
            self.sums[: len(block)].zero_()
        for far in passes:
            yield far, {"out": self.sums, "out_rows": far.entries, "accumulate": add}

    def clear(self) -> None:
        self.sums, self.of_target, self.start = None, (), -1


def numbers_of_rows(like: Tensor, rows: int, tokens: int) -> Sequence[Tensor]:
    """Room for a number of each token, (T,) for each row, in the dtype of ``like``."""
    if isinstance(tokens, torch.SymInt):
        # Inductor of torch 2.13 loses the offset of a view that a launch writes where the offset is
        # a multiple of a size that it does not know.
        return [like.new_empty(tokens) for _ in range(rows)]
    return like.new_empty(rows, tokens).unbind(0)


def total_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
