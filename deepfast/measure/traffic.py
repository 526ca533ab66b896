"""The states that deepfast's engine reads and writes in a step, counted from its schedule.

The unit is a state (T, D), in the connection alone, without layer-norms and layers.
"""

from deepfast.depth.schedule import FarPass, Schedule, default_block, one_for_all


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
