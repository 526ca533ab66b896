"""Which states a row reads, and W as it is applied to them."""

import functools

import torch

from deepfast.ops import common


@functools.cache
def depth_pattern(
    rows: int, window: int | None, dilation: int, period: int
) -> tuple[tuple[int, ...], ...]:
    """pattern[l]: the states that row l reads.

    ``window=w`` keeps the w newest states. ``dilation=a`` keeps of those every a-th, counted back
    from the newest. ``period=p`` mixes in every p-th row only; the other rows read the newest
    state alone (Pagliardini et al., DenseFormer, 2024).
    """
    pattern = []
    for row in range(rows):
        oldest = 0 if window is None else max(0, row - window + 1)
        mixes = period == 1 or row % period == 0
        pattern.append(tuple(sorted(range(row, oldest - 1, -dilation))) if mixes else (row,))
    return tuple(pattern)


class Applied(torch.autograd.Function):
    """Masks W to the pattern and, if asked for, softmaxes its rows.

    Written by hand so that it saves nothing through autograd: a first push inside a checkpointed
    function would otherwise save what a repeated one does not.
    """

    @staticmethod
    def forward(ctx, weight, mask, softmax):
        if softmax:
            weight = weight.masked_fill(~mask, float("-inf")).softmax(dim=1)
        applied = weight.masked_fill(~mask, 0)
        ctx.mask, ctx.rows = mask, applied if softmax else None
        return applied.clone() if softmax else applied

    @staticmethod
    @common.first_order("DLCL")
    def backward(ctx, grad):
        if ctx.rows is not None:
            grad = ctx.rows * (grad - (grad * ctx.rows).sum(1, keepdim=True))
        return grad.masked_fill(~ctx.mask, 0), None, None
