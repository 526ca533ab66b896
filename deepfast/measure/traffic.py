"""The number of states that each form of DLCL reads and writes in a step, from its schedule.

The unit is a state (T, D). Every operand that an op reads from memory and every result that it
writes counts, in the connection alone, without layer-norms and layers. Each of the N = L + 1 rows
reads all states below it.
"""

from deepfast.depth.schedule import default_block, near_rows


def _stack_and_sum(rows: int) -> int:
    total = 0
    for k in range(1, rows + 1):
        # stack: k read, k written; times W: the same; sum: k read, 1 written.
        total += 5 * k + 1
        # Backward. g times W: 1 read, k written; g times stack: k + 1 read, k written, k read again
        # by the sum for dW; adding to the gradients of older states: 2 read, 1 written each.
        total += (1 + k) + (3 * k + 1) + 3 * (k - 1)
    return total


def _loop_of_adds(rows: int) -> int:
    total = 0
    for k in range(1, rows + 1):
        # First term: 1 read, 1 written; each further one: a product (2) and a sum (3).
        total += 2 + 5 * (k - 1)
        # Backward of each term. W g: 2; g z, then its sum: 4; adding to the older gradient: 3.
        total += 6 * k + 3 * (k - 1)
    return total


def _densely_buffered(rows: int) -> int:
    total = 0
    for k in range(1, rows + 1):
        # Into the buffer: 2; tensordot: k read, 1 written.
        total += 2 + k + 1
        # Backward of the tensordot: outer product (1 + k), dW (k + 1); adding the gradients of
        # the older part of the buffer: 3 (k - 1).
        total += (1 + k) + (k + 1) + 3 * (k - 1)
    return total


def _look_ahead(rows: int, block: int) -> int:
    """Reads and writes for the mixes of all rows, from states that exist already."""
    total = 0
    for k in range(rows):
        start, end = near_rows(block, k, rows)
        if k == start and start > 0:
            total += start + (end - start)
        # The block's recent states, the partial sum, the result.
        total += (k - start) + (1 if start > 0 else 0) + 1
    return total


def _deepfast(rows: int, block: int | None = None) -> int:
    block = block or default_block(rows)
    # Forward: every state is read once from the layer and written into its slot.
    total = 2 * rows + _look_ahead(rows, block)
    # Backward recomputes the mixed inputs. They stay in registers and are not written.
    total += _look_ahead(rows, block) - rows
    for k in range(rows):
        start, end = near_rows(block, k, rows)
        later = rows - end
        if k == min(end, rows) - 1 and later:
            # One pass: the later gradients, the block's states for dW, the block's sums.
            total += later + 2 * (end - start)
        # Later gradients of the block, the far part, state k; dx in, g into its slot, dy out.
        total += (end - 1 - k) + (1 if later else 0) + 1 + 3
    return total


SCHEDULES = {
    "plain residual": lambda rows: 0,
    "stack and sum": _stack_and_sum,
    "loop of adds": _loop_of_adds,
    "DenseFormer form": _densely_buffered,
    "deepfast": _deepfast,
}
"""Variant -> states read and written in forward and backward, by the number of rows."""


def states_moved(variant: str, depth: int) -> int | None:
    """States read and written by the connection in one step; None where a compiler decides."""
    schedule = SCHEDULES.get(variant)
    return None if schedule is None else schedule(depth + 1)


def forward_reads(depth: int) -> dict[str, float]:
    """State reads of one forward pass: by the schedule, its bound, and of reading all below."""
    rows = depth + 1
    block = default_block(rows)
    reads = 0
    for k in range(rows):
        start, _ = near_rows(block, k, rows)
        reads += (start if k == start else 0) + (k - start + 1)
    return {
        "block": block,
        "schedule": reads,
        "bound": rows**2 / (2 * block) + rows * (block + 1) / 2,
        "all_below": rows * (rows + 1) / 2,
    }
