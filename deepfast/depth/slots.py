"""Buffers with slots of (T, D): for states, and for the sums of a block of rows."""

from collections.abc import Callable

from torch import Tensor


def empty_slots(count: int, like: Tensor) -> Tensor:
    """An uninitialised buffer (count, T, D) with slots for tensors like ``like`` (T, D).

    The distance from slot to slot is a whole number of pages plus one cache line. Without that line
    the same element of every slot would map to the same few cache sets.
    """
    line = 64 // like.element_size()
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride)[:, : like.numel()].unflatten(1, like.shape)


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
        groups: dict[tuple[int, ...], list[int]],
        like: Tensor,
        launch: Callable[[tuple[int, ...], list[int], Tensor, list[int], bool], None],
    ) -> None:
        """Computes ``sums[t - start]``, the sum for target t, for all t in [start, stop).

        groups: maps several targets to the sources that all of them sum. One launch computes one
            group. Where every target sums the same sources there is one group.
        launch: called with the targets, their sources, the buffer of sums, the targets' entries in
            it, and whether to add to them.
        """
        if self.sums is None:
            self.sums = empty_slots(self.block, like)
        everything = tuple(range(start, stop))
        whole = list(groups) == [everything]
        if not whole:
            self.sums[: stop - start].zero_()
        for targets, sources in groups.items():
            launch(targets, sources, self.sums, [t - start for t in targets], not whole)
        self.start = start
