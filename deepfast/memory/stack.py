"""What a stack of any depth keeps at every point of a step, from records of single layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast.memory.history import FP32, HistoryBytes
from deepfast.memory.ledger import CATEGORIES, GRADIENTS, HISTORY
from deepfast.memory.sizes import Side


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a stack under one policy, with the boundary above it: bytes of each of
    `CATEGORIES`."""

    kept: Tensor
    """(6,) from its forward to the end of the whole forward."""
    saved: Tensor
    """(6,) from its forward to its backward. Autocast frees its copies of weights after forward."""
    forward: Tensor
    """(parts, 6): the highest point in forward of each of its parts that reads, above what was
    alive at the layer's start."""
    backward: Tensor
    """(parts, 6): the same in backward, also from the lowest part to the highest."""
    gradients: int
    """The gradients of its parameters and of the norms before it."""
    forward_flops: int
    """Multiplications and additions of its matrix products."""
    backward_flops: int


class Stack:
    """One stack of layers with its connection.

    Args:
        records: policy -> a layer under it.
        policies: one for each layer.
        blocks: as in `HistoryBytes`.
    """

    def __init__(
        self,
        side: Side,
        records: dict[str, LayerRecord],
        policies: Sequence[str],
        blocks: bool = True,
    ):
        self.side, self.history = side, HistoryBytes(side, blocks)
        numbers = {policy: number for number, policy in enumerate(records)}
        index = torch.tensor([numbers[policy] for policy in policies], device="cpu")
        # (L, ..) each.
        self.kept, self.saved, self.up, self.down = (
            torch.stack([getattr(record, field) for record in records.values()])[index]
            for field in ("kept", "saved", "forward", "backward")
        )
        self.layer_gradients = records[policies[0]].gradients

    def holds(self, state: str) -> Tensor:
        """(6,) bytes that exist for this stack outside of its own forward and backward.

        Args:
            state: "nothing"; "states" where forward begins; "kept" after forward, and "saved" where
                autocast has ended; "learning" where backward begins; "learned" after it.
        """
        found = torch.zeros(len(CATEGORIES), dtype=torch.int64, device="cpu")
        if state == "learned":
            found[GRADIENTS] = FP32 * self.side.parameters
        elif state != "nothing":
            found[HISTORY] = self.history.bytes(state == "learning")
            if state != "states":
                found += (self.kept if state == "kept" else self.saved).sum(0)
        return found

    def forward(self) -> Tensor:
        """(N, 6): the highest points of forward, above "states"."""
        moments = self.up + (self.kept.cumsum(0) - self.kept).unsqueeze(1)
        moments[..., HISTORY] += self.history.partial()
        return moments.flatten(0, 1)

    def backward(self) -> Tensor:
        """(N, 6): the highest points of backward, above "learning"."""
        freed = self.saved.sum(0) - self.saved.cumsum(0)
        moments = self.down - freed.unsqueeze(1)
        above = torch.arange(len(self.down) - 1, -1, -1, device="cpu")
        moments[..., GRADIENTS] += self.layer_gradients * above.unsqueeze(1)
        moments[..., HISTORY] += self.history.pulled()
        return moments.flatten(0, 1)
