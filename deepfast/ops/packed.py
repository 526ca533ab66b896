"""Converts packed sentences (T, ...), without padding, to padded batches (N, S, ...) and back."""

import torch
from torch import Tensor

from deepfast.ops import common


@common.traced_as("pack")
class Gather(torch.autograd.Function):
    """Rows ``indices`` of a matrix. The indices are distinct, so backward need not add."""

    @staticmethod
    def forward(ctx, x, indices):
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return Scatter.apply(grad, indices, ctx.rows), None


@common.traced_as("unpack")
class Scatter(torch.autograd.Function):
    """A matrix of ``rows`` rows with those of x at ``indices``, and 0 elsewhere."""

    @staticmethod
    def forward(ctx, x, indices, rows):
        ctx.save_for_backward(indices)
        zeros = x.new_zeros(rows, *x.shape[1:])
        # A result written in place gets a gradient of zero under torch.compile of torch 2.11.
        if torch.compiler.is_compiling():
            return zeros.index_copy(0, indices, x)
        return zeros.index_copy_(0, indices, x)

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return Gather.apply(grad, indices), None, None


def places(cu_seqlens: Tensor, tokens: int, length: int) -> Tensor:
    """(T,) index of each packed token in the flattened (N, S) batch, S = ``length``."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    sentence = torch.bucketize(token, cu_seqlens[1:], right=True)
    return sentence * length + token - cu_seqlens[sentence]
