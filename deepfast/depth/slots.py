"""Buffers of (T, D) slots: an empty one, and one that holds the sums of a block of rows."""

from collections.abc import Callable

from torch import Tensor


def empty_slots(count: int, like: Tensor) -> Tensor:
    """(count, T, D) for tensors like ``like`` (T, D), neighbouring slots one cache line apart.

    A distance of a whole number of pages would put the same element of every slot into the same
    few cache sets.
    """
    line = 64 // like.element_size()
    stride = -(-like.numel() // (64 * line)) * 64 * line + line
    return like.new_empty(count, stride)[:, : like.numel()].unflatten(1, like.shape)


class BlockSums:
    """Sums of one block: a (T, D) sum for each of its rows (or states), computed together.

    Args:
        block: rows of a block.
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
        """Entry t - start of ``sums`` becomes the sum for target t, for all t in [start, stop).

        groups: targets to the sources that just these of them sum. There is one launch for each
            group; a full pattern has one.
        launch: takes targets, sources, where the sums go, their entries, and whether to add.
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
