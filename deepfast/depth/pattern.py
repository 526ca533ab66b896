"""The pattern of depth weights: which states a row reads, and W restricted to it."""

import functools

import torch
from torch import Tensor

from deepfast.ops import common


@functools.cache
def depth_pattern(
    rows: int, window: int | None, dilation: int, period: int
) -> tuple[tuple[int, ...], ...]:
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
def block_pattern(rows: int, size: int) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """The pattern of attention residuals in blocks of ``size`` states, and which states continue.

    State 0 is the embedding. After it state k is the sum of its block so far, so it contains state
    k - 1 unless it begins a block. Row l reads the embedding, the last state of every finished
    block, and state l.
    """
    pattern = tuple(tuple(sorted({0, *range(size, row + 1, size), row})) for row in range(rows))
    return pattern, tuple(k > 0 and (k - 1) % size != 0 for k in range(rows))


def pattern_mask(pattern: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """(L+1, L+1) bool: whether row l reads state k."""
    mask = torch.zeros(len(pattern), len(pattern), dtype=torch.bool)
    for row, sources in enumerate(pattern):
        mask[row, list(sources)] = True
    return mask.to(device)


@common.traced_as("masked_weight")
class MaskedWeight(torch.autograd.Function):
    """Masks W to the pattern; with ``softmax`` its rows pass through a softmax first.

    Written by hand so that it saves nothing through autograd. A first push inside a checkpointed
    function would otherwise save a tensor that the recomputed push does not save.
    """

    @staticmethod
    def forward(ctx, weight, mask, softmax):
        if softmax:
            weight = weight.masked_fill(~mask, float("-inf")).softmax(dim=1)
        masked = weight.masked_fill(~mask, 0)
        ctx.mask, ctx.rows = mask, masked if softmax else None
        return masked.clone() if softmax else masked

    @staticmethod
    @common.first_order("DLCL")
    def backward(ctx, grad):
        if ctx.rows is not None:
            grad = ctx.rows * (grad - (grad * ctx.rows).sum(1, keepdim=True))
        return grad.masked_fill(~ctx.mask, 0), None, None
