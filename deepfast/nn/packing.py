"""Padding removed: a batch of sentences as one (T, D) matrix of its real tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast.ops.packed import Gather, Scatter


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the real tokens of a (B, S) batch stand.

    Args:
        batch, length: B and S.
        indices: (T,) positions of real tokens in the flattened batch; None where there is no
            padding and packing is a view.
        padding: (B, S) bool, True is padding; None where there is none.
    """

    batch: int
    length: int
    indices: Tensor | None = None
    padding: Tensor | None = None

    @classmethod
    def of(cls, batch: int, length: int, padding: Tensor | None) -> "Packing":
        """From a key padding mask (B, S), True is padding."""
        if padding is None:
            return cls(batch, length)
        if tuple(padding.shape) != (batch, length) or padding.dtype != torch.bool:
            raise ValueError(
                f"key_padding_mask must be bool ({batch}, {length}), got {padding.dtype} "
                f"{tuple(padding.shape)}"
            )
        indices = (~padding).flatten().nonzero().squeeze(1)
        if indices.numel() == batch * length:
            return cls(batch, length)
        return cls(batch, length, indices, padding)

    def pack(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (T, D)."""
        x = x_BSD.reshape(self.batch * self.length, x_BSD.shape[-1])
        return x if self.indices is None else Gather.apply(x, self.indices)

    def unpack(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (B, S, D), zero at padding."""
        x = x_TD
        if self.indices is not None:
            x = Scatter.apply(x_TD, self.indices, self.batch * self.length)
        return x.view(self.batch, self.length, x_TD.shape[-1])
