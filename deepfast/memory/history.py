"""What a depth connection keeps of a stack: closed formulas, since it depends on the depth."""

from functools import lru_cache

import torch
from torch import Tensor

from deepfast.depth.schedule import default_block
from deepfast.memory.sizes import Sizes
from deepfast.ops.common import empty_slots
from deepfast.policies import ATTENTION_RESIDUALS, MIXING

FP32 = 4


@lru_cache(maxsize=64)
def _slot_bytes(tokens: int, width: int, dtype: str) -> int:
    """Bytes of a slot in the engine's buffers of states and of sums."""
    state = torch.empty(tokens, width, dtype=getattr(torch, dtype), device="meta")
    return empty_slots(1, state).untyped_storage().nbytes()


class History:
    """The memory of the connection of one stack.

    Args:
        num_layers: L of the stack.
        blocks: whether its rows are computed in blocks; a stack of few layers may do without.
    """

    def __init__(self, sizes: Sizes, num_layers: int, decoder: bool, blocks: bool = True):
        self.sizes, self.parts = sizes, sizes.parts(decoder)
        self.kind, self.rows = sizes.kind(decoder), num_layers * self.parts + 1
        self.mixes, self.attends = self.kind in MIXING, self.kind in ATTENTION_RESIDUALS
        self.tokens = sizes.target_tokens if decoder else sizes.tokens
        self.block = default_block(self.rows, sizes.device, 16 if self.attends else 8)
        self.blocks = blocks and self.mixes and self.rows > self.block

    def bytes(self, learning: bool = False) -> int:
        """States, statistics and weights.

        Args:
            learning: whether backward has begun: there are gradients of the weights, and the sums
                of a block of rows.
        """
        if not self.mixes:
            return 0
        sizes = self.sizes
        norms = sizes.norm_values * sizes.dim
        if self.attends:
            # A copy of the queries. For each row the numbers of its norm, for each state its RMS,
            # and three for a softmax.
            weights, numbers = sizes.dim, sizes.norm_values + 4
        else:
            # Copies of W and of the norms. A state's norm stores a standard deviation.
            weights, numbers = self.rows * sizes.depth_channels + norms, sizes.norm_values
            numbers += sizes.norm == "pre"
        # One slot for each state, and one more for the last gradient.
        found = (self.rows + 1) * _slot_bytes(self.tokens, sizes.dim, sizes.dtype)
        found += FP32 * self.rows * (numbers * self.tokens + weights)
        if learning:
            found += FP32 * self.rows * weights + self._sums()
            if self.kind == "block_attnres":
                # What a running sum adds to the gradient of the state before it.
                found += self.tokens * sizes.dim * sizes.bytes
        return found

    def partial(self) -> Tensor:
        """(L, parts) bytes of the sums in forward of each part: none in the first block."""
        return self._sums() * (self._parts() + 1 >= self.block)

    def pulled(self) -> Tensor:
        """(L, parts) bytes of the sums of gradients in backward of each part: none in the last
        block."""
        last_block = self.block * ((self.rows - 1) // self.block)
        return self._sums() * (self._parts() < last_block - 1)

    def _parts(self) -> Tensor:
        """The number of each part of each layer."""
        return torch.arange(self.rows - 1, device="cpu").view(-1, self.parts)

    def _sums(self) -> int:
        if not self.blocks:
            return 0
        # Two numbers of a softmax.
        statistics = 2 * FP32 * self.tokens if self.attends else 0
        return self.block * (_slot_bytes(self.tokens, self.sizes.dim, "float32") + statistics)
