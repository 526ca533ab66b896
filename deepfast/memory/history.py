"""What a depth connection keeps of a stack: closed formulas, since it depends on the depth."""

from functools import lru_cache

import torch
from torch import Tensor

from deepfast.depth.attention_residuals import AttentionPass
from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.schedule import default_block
from deepfast.memory.sizes import Side
from deepfast.ops.common import empty_slots
from deepfast.policies import MIXING

FP32 = 4


@lru_cache(maxsize=64)
def _slot_bytes(tokens: int, width: int, dtype: str) -> int:
    """Bytes of a slot in the buffers of states and of sums of `deepfast.depth`."""
    state = torch.empty(tokens, width, dtype=getattr(torch, dtype), device="meta")
    return empty_slots(1, state).untyped_storage().nbytes()


class HistoryBytes:
    """The memory of the connection of one stack.

    blocks: whether its rows are computed in blocks; a stack of few layers may do without.
    """

    def __init__(self, side: Side, blocks: bool = True):
        self.side, self.mixes = side, side.connection in MIXING
        per_pull = (AttentionPass if side.attends else DepthPass).states_per_pull
        self.block = default_block(side.rows, side.sizes.device, per_pull)
        self.blocks = blocks and self.mixes and side.rows > self.block

    def bytes(self, learning: bool = False) -> int:
        """States, statistics and weights.

        Args:
            learning: whether backward has begun: there are gradients of the weights, and the sums
                of a block of rows.
        """
        if not self.mixes:
            return 0
        side, sizes, rows = self.side, self.side.sizes, self.side.rows
        if side.attends:
            # A copy of the queries. For each row the numbers of its norm, for each state its RMS,
            # and three for a softmax.
            weights, numbers = sizes.dim, sizes.norm_values + 4
        else:
            # Copies of W and of the norms. A state's norm stores a standard deviation.
            weights = rows * sizes.depth_channels + sizes.norm_values * sizes.dim
            numbers = sizes.norm_values + (sizes.norm == "pre")
        # One slot for each state, and one more for the last gradient.
        found = (rows + 1) * _slot_bytes(side.tokens, sizes.dim, sizes.dtype)
        found += FP32 * rows * (numbers * side.tokens + weights)
        if learning:
            found += FP32 * rows * weights + self._sums()
            if side.connection == "block_attnres":
                # What a running sum adds to the gradient of the state before it.
                found += side.tokens * sizes.dim * sizes.bytes
        return found

    def partial(self) -> Tensor:
        """(L, parts) bytes of the sums in forward of each part: none in the first block."""
        return self._sums() * (self._parts() + 1 >= self.block)

    def pulled(self) -> Tensor:
        """(L, parts) bytes of the sums of gradients in backward of each part: none in the last
        block."""
        last_block = self.block * ((self.side.rows - 1) // self.block)
        return self._sums() * (self._parts() < last_block - 1)

    def _parts(self) -> Tensor:
        """The number of each part of each layer."""
        return torch.arange(self.side.rows - 1, device="cpu").view(-1, self.side.parts)

    def _sums(self) -> int:
        if not self.blocks:
            return 0
        # Two numbers of a softmax.
        statistics = 2 * FP32 * self.side.tokens if self.side.attends else 0
        slot = _slot_bytes(self.side.tokens, self.side.sizes.dim, "float32")
        return self.block * (slot + statistics)
