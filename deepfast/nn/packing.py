"""Padding removed: a batch of sentences as one (T, D) matrix of its real tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import checks
from deepfast.ops.packed import Gather, Scatter
from deepfast.ops.register import watched


@dataclass(frozen=True, eq=False)
class Packing:
    """The positions of the real tokens in a (B, S) batch.

    Args:
        batch, length: B and S.
        indices: (T,) positions of the real tokens in the flattened batch. With None packing is a
            view, and every position is a packed token.
        padding: (B, S) bool, True is padding; None where there is no padding. With padding and
            without indices, the packed tokens include the padding.
    """

    batch: int
    length: int
    indices: Tensor | None = None
    padding: Tensor | None = None

    @classmethod
    def of(
        cls, batch: int, length: int, padding: Tensor | None, *, argument: str = "key_padding_mask"
    ) -> "Packing":
        """Makes one from a key padding mask (B, S), True is padding. Errors name ``argument``."""
        if padding is None:
            return cls(batch, length)
        if not isinstance(padding, Tensor):
            raise TypeError(f"{argument} must be a tensor or None, got {type(padding).__name__}")
        if tuple(padding.shape) != (batch, length) or padding.dtype != torch.bool:
            raise ValueError(
                f"{argument} must be bool ({batch}, {length}), got {padding.dtype} "
                f"{tuple(padding.shape)}"
            )
        if torch.compiler.is_compiling():
            # A compiler needs a fixed number of tokens, so padding is computed and then set to 0.
            return cls(batch, length, None, padding)
        # A copy, because backward reads it and the caller may write the next batch into the mask.
        padding = padding.clone()
        indices = (~padding).flatten().nonzero().squeeze(1)
        if indices.numel() == batch * length:
            return cls(batch, length)
        return cls(batch, length, indices, padding)

    @property
    def tokens(self) -> int:
        """T, the number of packed tokens."""
        return self.batch * self.length if self.indices is None else self.indices.shape[0]

    def pack(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (T, D)."""
        x = x_BSD.reshape(self.batch * self.length, x_BSD.shape[-1])
        return x if self.indices is None else Gather.apply(x, self.indices)

    def unpack(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (B, S, D), zero at padding."""
        x = x_TD
        if self.indices is not None:
            x = Scatter.apply(x_TD, self.indices, self.batch * self.length)
        x = x.view(self.batch, self.length, x_TD.shape[-1])
        if self.indices is None and self.padding is not None:
            x = x.masked_fill(self.padding.unsqueeze(-1), 0)
        return x

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """(B + 1,) int32: the first packed token of each sentence, then the number of tokens.

        Computed once per device: copying it from another device would wait for that device.
        """
        if torch.compiler.is_compiling():
            return self._cu_seqlens(device)
        made = self.__dict__.setdefault("_made", {})
        if device not in made:
            # A tensor that is made in inference mode cannot be saved for backward.
            with torch.inference_mode(False):
                made[device] = self._cu_seqlens(device)
        return made[device]

    def sentences(self, device: torch.device) -> Tensor:
        """(T,) int64: the sentence of each packed token. Computed once."""
        made = self.__dict__.setdefault("_made", {})
        if ("sentences", device) not in made:
            with torch.inference_mode(False):
                each = torch.arange(self.batch, device=device).repeat_interleave(self.length)
                made["sentences", device] = each if self.indices is None else each[self.indices]
        return made["sentences", device]

    def _cu_seqlens(self, device: torch.device) -> Tensor:
        if self.indices is None:
            return torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.length
        lengths = (~self.padding).sum(1)
        return F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)


def check_packed(op: str, name: str, x_TD: Tensor, packing: Packing, dim: int) -> None:
    """Raises where x_TD is not the tokens (T, ``dim``) of ``packing``; errors name ``op``."""
    checks.tensor(op, name, x_TD)
    if not isinstance(packing, Packing):
        raise TypeError(f"{op}: packing must be a Packing, got {type(packing).__name__}")
    if tuple(x_TD.shape) != (packing.tokens, dim):
        raise ValueError(f"{op}: {name} must be ({packing.tokens}, {dim}), got {tuple(x_TD.shape)}")


def packed(
    op: str,
    x_BSD: Tensor,
    dim: int,
    padding: Tensor | None,
    *,
    name: str = "x",
    argument: str = "key_padding_mask",
) -> tuple[Tensor, Packing]:
    """Packs a batch: its real tokens (T, D), and their positions. Errors name ``op``.

    Args:
        x_BSD: (B, S, ``dim``).
        padding: (B, S) bool, True is padding, or None.
        name, argument: the names of x_BSD and of its mask in errors.

    Raises:
        TypeError, ValueError: for operands that do not fit.
    """
    checks.tensor(op, name, x_BSD)
    if x_BSD.dim() != 3 or x_BSD.shape[-1] != dim:
        raise ValueError(f"{op}: {name} must be (B, S, {dim}), got {tuple(x_BSD.shape)}")
    packing = Packing.of(x_BSD.shape[0], x_BSD.shape[1], padding, argument=f"{op}: {argument}")
    return packing.pack(x_BSD), packing


def packed_pair(
    op: str, pair: tuple[Tensor, Any], dim: int, masks: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Packing, Tensor, Packing]:
    """`packed` of a decoder's input x and of the encoder's output, with their masks.

    Raises:
        TypeError, ValueError: as `packed`; ValueError also where the batch sizes differ, and where
            a mask on the CPU has padding of x that is not on the right.
    """
    padding = masks[0]
    x, packing = packed(op, pair[0], dim, padding)
    encoded, encoded_packing = packed(
        op, pair[1], dim, masks[1], name="encoded", argument="encoded_key_padding_mask"
    )
    if encoded_packing.batch != packing.batch:
        raise ValueError(
            f"{op}: encoded must have x's batch size {packing.batch}, got {encoded_packing.batch}"
        )
    # Reading a mask would wait for a GPU.
    if padding is not None and padding.device.type == "cpu" and not watched(padding):
        late = (padding[:, :-1] & ~padding[:, 1:]).any(1).nonzero().flatten().tolist()
        if late:
            raise ValueError(
                f"{op}: padding of x must be on the right of its tokens, got padding in front of a "
                f"token in sentence {late[0]}"
            )
    return x, packing, encoded, encoded_packing
