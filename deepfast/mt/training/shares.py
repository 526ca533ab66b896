"""The share of each rank of a step's micro-batches.

A step has the same micro-batches on any number of ranks. The ranks first divide the micro-batches
among themselves, as far as their number allows, and then the sentences of a micro-batch. With 4
micro-batches, 2 ranks take 2 each, and 8 ranks are pairs that divide one each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from deepfast.mt.data import Batch, take


class Share(NamedTuple):
    """A rank's part of a micro-batch."""

    batch: Batch
    counts: bool
    """False for a sentence that only keeps this rank in step: its loss counts nothing."""


def shares(batches: Sequence[Batch], rank: int, size: int, *, whole: bool = True) -> list[Share]:
    """What a rank computes of a step, the same number of parts on every rank.

    Args:
        whole: whether different ranks may work on different micro-batches.
    """
    if size == 1:
        return [Share(batch, True) for batch in batches]
    together = micro_batches_at_once(len(batches), size) if whole else 1
    if together > 1:
        # Ranks run side by side on micro-batches of about the same size.
        batches = sorted(batches, key=_tokens)
    divided = size // together
    return [
        _part(batch, rank % divided, divided)
        for batch in batches[rank // divided :: together]
    ]  # fmt: skip


def micro_batches_at_once(count: int, size: int) -> int:
    """How many of `count` micro-batches run at the same time on `size` ranks."""
    return math.gcd(count, size)


def _tokens(batch: Batch) -> int:
    return batch.source_tokens + batch.target_tokens


def _part(batch: Batch, part: int, parts: int) -> Share:
    """One of `parts` parts with about the same number of tokens; each sentence is in one."""
    if parts == 1:
        return Share(batch, True)
    lengths = (batch.source_lengths_B + batch.target_lengths_B).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rows: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for row in longest_first:
        least = loads.index(min(loads))
        rows[least].append(row)
        loads[least] += lengths[row]
    mine = sorted(rows[part])
    # Every rank takes part in every common call, also where there are fewer sentences than ranks.
    return Share(take(batch, mine or longest_first[-1:]), bool(mine))
