"""Which states each row reads, and in which pass over the states.

For the stack in the picture of `deepfast.depth`, with 12 rows in blocks of 4, ``Schedule`` says::

    blocks[5]                (4, 8)         row 5 is in the block of rows 4 to 7
    near[5]                  [4, 5]         forward: of its own block row 5 reads z4 and z5
    far_reads(4, 8)          one FarPass    forward: sources z0 .. z3, for the targets P_4 .. P_7
    near_readers(5, 11)      [5, 6, 7]      backward: of its block's rows these read z5
    far_readers(4, 8, rows)  one FarPass    backward: sources g8 .. g11, for the targets Q_4 .. Q_7

With a window, a dilation or a period the targets of a block read different sources. Those that read
the same ones share a FarPass, so there may be several.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

Pattern = tuple[tuple[int, ...], ...]
"""pattern[l] has the states that row l reads, in ascending order."""


@functools.cache
def depth_pattern(rows: int, window: int | None, dilation: int, period: int) -> Pattern:
    """pattern[l]: the states that row l reads.

    ``window=w`` keeps the w newest states. ``dilation=a`` keeps every a-th of those, counted back
    from the newest. ``period=p`` mixes in every p-th row only; the other rows read the newest
    state alone (Pagliardini et al., DenseFormer, 2024).
    """
    pattern = []
    for row in range(rows):
        oldest = 0 if window is None else max(0, row - window + 1)
        mixes = period == 1 or row % period == 0
        pattern.append(tuple(sorted(range(row, oldest - 1, -dilation))) if mixes else (row,))
    return tuple(pattern)


@functools.cache
def block_pattern(rows: int, size: int) -> tuple[Pattern, tuple[bool, ...]]:
    """The pattern of attention residuals in blocks of ``size`` states, and which states continue.

    State 0 is the embedding. After it state k is the sum of its block so far, so it contains state
    k - 1 unless it begins a block. Row l reads the embedding, the last state of every finished
    block, and state l.
    """
    pattern = tuple(tuple(sorted({0, *range(size, row + 1, size), row})) for row in range(rows))
    return pattern, tuple(k > 0 and (k - 1) % size != 0 for k in range(rows))


FAR_PASS = 4
"""The cost of a launch over far states on a GPU, in states: a copy moves so many in its time.
About 1 in a CUDA graph, 4 to 14 in eager code at T = 8192, D = 1024."""


@functools.cache
def default_block(rows: int, device_type: str = "cpu", states_per_pull: int = 8) -> int:
    """Rows per block.

    On a CPU it was chosen by measurement: memory traffic falls until a block has about sqrt(rows)
    rows, but a pass for more than 8 rows is limited by arithmetic there. Elsewhere it is chosen by
    count: the fewest states that a step moves, with `FAR_PASS` for each launch over far states.
    Up to 8 rows make one block: a far pass would cost more than it saves.

    Args:
        states_per_pull: of `DepthPass`. A launch over far states serves 16 rows.
    """
    if rows <= 8:
        return rows
    if device_type == "cpu":
        return 4 if rows <= 32 else 8
    return min(range(4, 17), key=lambda block: block_cost(rows, block, states_per_pull))


def block_cost(rows: int, block: int, states_per_pull: int) -> float:
    """What depends on the block: states that a step reads and writes, where each row reads all
    states below it, and `FAR_PASS` for each launch over far states."""
    cost = 0.0
    for start in range(0, rows, block):
        end = min(start + block, rows)
        count = end - start
        # Forward, backward's recompute, and the gradients that a state pulls.
        cost += 1.5 * count * (count - 1)
        # Forward and recompute read the far states, write their sums and read them.
        cost += 2 * (start + 2 * count + FAR_PASS) * (start > 0)
        # The pull reads the far gradients and its states, writes sums, and the boundary reads them.
        launches = -(-count // states_per_pull)
        cost += (launches * (rows - end + FAR_PASS) + 3 * count) * (end < rows)
    return cost


def block_of(block: int, k: int, rows: int) -> tuple[int, int]:
    """The block [s, e) that row or state k belongs to."""
    start = block * (k // block)
    return start, min(start + block, rows)


class FarPass(NamedTuple):
    """One launch over what lies outside a block, for the targets in the block that read the same
    sources.

    In forward the targets are rows, and the sources earlier states. In backward the targets are
    states, and the sources the gradients of later rows.
    """

    targets: list[int]
    sources: list[int]
    entries: list[int]
    """Where the sum of each target is among the sums of the block."""


def one_for_all(passes: Sequence[FarPass], targets: int) -> bool:
    """Whether a single pass computes the sums of all the targets of a block. It then writes them.
    Else the sums begin with 0, and each pass adds to some of them."""
    return len(passes) == 1 and len(passes[0].targets) == targets


class Schedule:
    """Which states each row reads, and in which pass, for blocks of rows.

    Args:
        pattern: the states that each row reads.
        block: rows per block.
    """

    def __init__(self, pattern: Pattern, block: int):
        self.rows, self.block = len(pattern), block
        self.reads = tuple(frozenset(reads) for reads in pattern)
        self.blocks = tuple(block_of(block, row, self.rows) for row in range(self.rows))
        """For every row, the block [s, e) that it belongs to."""
        self.near = tuple(
            [k for k in reads if k >= start]
            for reads, (start, _) in zip(pattern, self.blocks, strict=True)
        )
        """For every row, the states of its own block that it reads."""
        self._passes: dict[tuple[range, range], list[FarPass]] = {}

    def far_reads(self, start: int, end: int) -> list[FarPass]:
        """Forward: the passes over the states before ``start`` for the rows [start, end)."""
        return self._far(range(start, end), range(start), lambda row, k: k in self.reads[row])

    def far_readers(self, start: int, stop: int, rows: range) -> list[FarPass]:
        """Backward: the passes over the gradients of ``rows`` for the states [start, stop)."""
        return self._far(range(start, stop), rows, lambda k, row: k in self.reads[row])

    def near_readers(self, k: int, top: int) -> list[int]:
        """Backward: the rows of state k's own block, up to row ``top``, that read it."""
        end = min(self.blocks[k][1], top + 1)
        return [row for row in range(k, end) if k in self.reads[row]]

    def _far(
        self, targets: range, sources: range, reads: Callable[[int, int], bool]
    ) -> list[FarPass]:
        if (targets, sources) not in self._passes:
            groups = defaultdict(list)
            for source in sources:
                readers = tuple(target for target in targets if reads(target, source))
                if readers:
                    groups[readers].append(source)
            # Stored only when complete, because other threads may run this stack.
            self._passes[targets, sources] = [
                FarPass(list(readers), read, [target - targets.start for target in readers])
                for readers, read in groups.items()
            ]
        return self._passes[targets, sources]
