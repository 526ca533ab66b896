"""The memory traffic of a step, counted and not measured: every operand that an op reads and every
result that it writes.

For a form whose schedule is known the unit is a state (T, D), in the connection alone, without
layer-norms and layers. Each of the N = L + 1 rows reads all states below it. `OpTraffic` counts the
ops of any run.
"""

import math

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepfast.depth.schedule import (
    FarPass,
    Schedule,
    block_of,
    default_block,
    depth_pattern,
    one_for_all,
)

PER_ROW = {
    # stack: k read, k written; times W: the same; sum: k read, 1 written. Backward. g times W: 1
    # read, k written; g times stack: k + 1 read, k written, k read again by the sum for dW; adding
    # to the gradients of older states: 2 read, 1 written each.
    "stack and sum": lambda k: (5 * k + 1) + (1 + k) + (3 * k + 1) + 3 * (k - 1),
    # First term: 1 read, 1 written; each further one: a product (2) and a sum (3). Backward of each
    # term. W g: 2; g z, then its sum: 4; adding to the older gradient: 3.
    "loop of adds": lambda k: 2 + 5 * (k - 1) + 6 * k + 3 * (k - 1),
    # Into the buffer: 2; tensordot: k read, 1 written. Backward of the tensordot: outer product
    # (1 + k), dW (k + 1); adding the gradients of the older part of the buffer: 3 (k - 1).
    "DenseFormer form": lambda k: 2 + (k + 1) + (1 + k) + (k + 1) + 3 * (k - 1),
    "plain residual": lambda k: 0,
}
"""Form -> states read and written in forward and backward by the k-th row, from 1."""


def _far(passes: list[FarPass], count: int, reads: int) -> int:
    """The passes that compute the sums of a block.

    Args:
        count: the targets of the block.
        reads: how many states a pass reads for each of its targets.
    """
    whole = one_for_all(passes, count)
    # Where one pass does not compute all sums, they are set to 0 and added to.
    moved = 0 if whole or not passes else count
    for far in passes:
        moved += len(far.sources) + (reads + (1 if whole else 2)) * len(far.targets)
    return moved


def _mixes(schedule: Schedule) -> int:
    """Reads and writes for the mixes of all rows, from states that exist already."""
    total = 0
    for row, (start, end) in enumerate(schedule.blocks):
        passes = schedule.far_reads(start, end)
        if row == start:
            total += _far(passes, end - start, 0)
        # The block's recent states, the partial sum, the result.
        total += len(schedule.near[row]) - 1 + bool(passes) + 1
    return total


def engine_moved(
    pattern: tuple[tuple[int, ...], ...],
    continues: tuple[bool, ...] | None = None,
    block: int | None = None,
    device_type: str = "cpu",
) -> int:
    """States that deepfast's engine reads and writes in forward and backward of one pass.

    Every row's result is mixed again in backward, as before a layer-norm.

    Args:
        pattern: pattern[l]: the states that row l reads, its own among them.
        continues: continues[k]: whether state k contains state k - 1; None: no state does.
        block: rows per block; None for the default on a device of ``device_type``.
    """
    rows = len(pattern)
    schedule = Schedule(pattern, block or default_block(rows, device_type))
    far = [schedule.far_readers(start, end, range(end, rows)) for start, end in schedule.blocks]
    # Forward: every state is read once from the layer and written into its slot.
    total = 2 * rows + _mixes(schedule)
    # Backward recomputes the mixed inputs. They stay in registers and are not written.
    total += _mixes(schedule) - rows
    for k, (start, end) in enumerate(schedule.blocks):
        if k == end - 1:
            # The later gradients, the block's states for the weights' gradient, the block's sums.
            total += _far(far[k], end - start, 1)
        # Later gradients of the block, the far part, state k; dx in, g into its slot, dy out.
        total += sum(k in schedule.reads[row] for row in range(k + 1, end))
        total += bool(far[k]) + 1 + 3
        if continues is not None and continues[k]:
            # State k - 1, in forward. Its gradient from state k, written, then read or, where that
            # state has a far part, added to it.
            total += 2 + (3 if far[k - 1] else 1)
    return total


def states_moved(variant: str, depth: int) -> int | None:
    """States read and written by the connection in one step; None where a compiler decides."""
    if variant == "deepfast":
        return engine_moved(depth_pattern(depth + 1, None, 1, 1))
    row = PER_ROW.get(variant)
    return None if row is None else sum(map(row, range(1, depth + 2)))


def forward_reads(depth: int) -> dict[str, float]:
    """State reads of one forward pass: by the schedule, its bound, and of reading all below."""
    rows = depth + 1
    block = default_block(rows)
    reads = 0
    for k in range(rows):
        start, _ = block_of(block, k, rows)
        reads += (start if k == start else 0) + (k - start + 1)
    return {
        "block": block,
        "schedule": reads,
        "bound": rows**2 / (2 * block) + rows * (block + 1) / 2,
        "all_below": rows * (rows + 1) / 2,
    }


class OpTraffic(TorchDispatchMode):
    """Counts the operands and results of every op that runs inside it.

    A tensor that an op modifies in place counts as read and as written. The caches of the processor
    and what happens inside an op are not seen.

    Attributes:
        nbytes: bytes so far.
    """

    _UNTOUCHED = ("empty", "new_empty", "empty_like", "_unsafe_view")
    """Ops that neither read nor write, besides the views."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        schema = func._schema
        if not func.is_view and schema.name.rpartition(":")[2] not in self._UNTOUCHED:
            self.nbytes += sum(_bytes_of(x) for x in tree_leaves((args, kwargs, results)))
        return results


def _bytes_of(operand: object) -> int:
    """The bytes of a tensor; 0 for anything else. An expanded dimension is one element."""
    if not isinstance(operand, Tensor):
        return 0
    shape = zip(operand.shape, operand.stride(), strict=True)
    return operand.element_size() * math.prod(size if stride else 1 for size, stride in shape)
