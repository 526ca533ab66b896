"""Which states each row reads, and in which pass over the states."""

from collections import defaultdict


def default_block(rows: int) -> int:
    """Rows per block, chosen by measurement on a CPU.

    Memory traffic falls until a block has about sqrt(rows) rows. But there a pass for more than 8
    rows is limited by arithmetic, not by memory traffic. On CUDA a far pass of forward takes up to
    16 rows, one of backward 8; bench/results/limits.md counts what that gives.
    """
    return 4 if rows <= 32 else 8


def near_rows(block: int, k: int, rows: int) -> tuple[int, int]:
    """The block [s, e) that row or state k belongs to."""
    start = block * (k // block)
    return start, min(start + block, rows)


class Schedule:
    """Which states each row reads, and in which pass, for blocks of rows.

    Args:
        pattern: pattern[l] has the states that row l reads, in ascending order.
        block: rows per block.
        rows: how many of the rows are computed with a state; the others come after the last state.
        first: a row that begins a block; the block before it may be shorter.
    """

    def __init__(
        self,
        pattern: tuple[tuple[int, ...], ...],
        block: int,
        rows: int | None = None,
        first: int = 0,
    ):
        self.rows, self.block = len(pattern) if rows is None else rows, block
        self.reads = tuple(frozenset(reads) for reads in pattern)
        below = (near_rows(block, row, first) for row in range(first))
        above = (near_rows(block, row, self.rows - first) for row in range(self.rows - first))
        self.blocks = (*below, *((first + start, first + end) for start, end in above))
        """For every row, the block [s, e) that it belongs to."""
        self.near = tuple(
            [k for k in reads if k >= start]
            for reads, (start, _) in zip(pattern, self.blocks, strict=False)
        )
        """For every row, the states of its own block that it reads."""
        self._groups: dict[tuple, dict[tuple[int, ...], list[int]]] = {}

    def far_reads(self, start: int, end: int) -> dict[tuple[int, ...], list[int]]:
        """Rows of [start, end) -> the states before start that exactly these rows read."""
        key = start, end
        if key not in self._groups:
            groups = defaultdict(list)
            for k in range(start):
                readers = tuple(r for r in range(start, end) if k in self.reads[r])
                if readers:
                    groups[readers].append(k)
            # Stored only when complete, because other threads may run this stack.
            self._groups[key] = groups
        return self._groups[key]

    def far_readers(
        self, start: int, stop: int, later: tuple[int, ...]
    ) -> dict[tuple[int, ...], list[int]]:
        """States of [start, stop) -> the rows of ``later`` that read exactly these of them."""
        key = start, stop, later
        if key not in self._groups:
            groups = defaultdict(list)
            for row in later:
                sources = tuple(j for j in range(start, stop) if j in self.reads[row])
                if sources:
                    groups[sources].append(row)
            self._groups[key] = groups
        return self._groups[key]
