"""Buffers with slots of (T, D): for states, and for the sums of a block of rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


def empty_slots(count: int, like: Tensor) -> Tensor:
    """An uninitialised buffer (count, T, D) with slots for tensors like ``like`` (T, D).

    The distance from slot to slot is a whole number of pages plus one cache line. Without that line
    the same element of every slot would map to the same few cache sets.
    """
    line = 64 // like.element_size()
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride)[:, : like.numel()].unflatten(1, like.shape)


class Share(NamedTuple):
    """What one launch adds to the sums of a block."""

    targets: tuple[int, ...]
    """They sum the same sources."""
    sources: list[int]
    launch: Callable[[tuple[int, ...], list[int], Tensor, list[int], bool], None]
    """Called with the targets, their sources, the buffer of sums, the targets' entries in it, and
    whether to add to them."""


def sum_shares(
    sums: Tensor,
    start: int,
    stop: int,
    shares: Sequence[Share],
    begin: Callable[[Tensor, int, int], None] | None = None,
) -> None:
    """Computes ``sums[t - start]``, the sum for target t, for all t in [start, stop).

    shares: one launch each. Where every target sums the same sources there is one.
    begin: called with ``sums``, start and stop, sets what the sums begin with; None for 0.
    """
    everything = tuple(range(start, stop))
    whole = begin is None and [share.targets for share in shares] == [everything]
    if begin is not None:
        begin(sums, start, stop)
    elif not whole:
        sums[: stop - start].zero_()
    for targets, sources, launch in shares:
        launch(targets, sources, sums, [t - start for t in targets], not whole)


class BlockSums:
    """The sums of one block: a (T, D) sum for each of its rows (or states), computed together.

    Args:
        block: rows per block.
    """

    def __init__(self, block: int):
        self.block = block
        self.clear()

    def clear(self) -> None:
        """Frees the buffer."""
        self.sums: Tensor | None = None
        self.start = -1

    def compute(
        self,
        start: int,
        stop: int,
        shares: Sequence[Share],
        like: Tensor,
        begin: Callable[[Tensor, int, int], None] | None = None,
    ) -> None:
        """Computes the sums for all targets in [start, stop), see `sum_shares`.

        like: a state (T, D).
        """
        if self.sums is None:
            self.sums = empty_slots(self.block, like)
        sum_shares(self.sums, start, stop, shares, begin)
        self.start = start
