"""Attention over depth, forward and backward, beside stacking in plain PyTorch."""

import pytest
import torch

from deepfast import ops

COUNT, TOKENS, DIM = 31, 2048, 512


def stacked(sources, query, eps=1e-6):
    """Stack, normalise, score, softmax, sum: the published form."""
    v = torch.stack(sources, 1)
    weights = (torch.nn.functional.rms_norm(v, v.shape[-1:], eps=eps) @ query.mT).softmax(1)
    return weights.mT @ v


def make(dtype: torch.dtype, hops: int, count: int = COUNT) -> dict:
    """A step of each form on the same numbers, and the bytes a step has to move."""
    sources = [torch.randn(TOKENS, DIM).to(dtype).requires_grad_() for _ in range(count)]
    query = (torch.randn(hops, DIM) / DIM**0.5).requires_grad_()
    own = query.detach().to(dtype).requires_grad_()
    grad = torch.randn(TOKENS, hops, DIM).to(dtype)

    def deepfast():
        out = ops.depth_attention(sources, query)
        torch.autograd.grad(out, (*sources, query), grad)

    def plain():
        torch.autograd.grad(stacked(sources, own), (*sources, own), grad)

    # Forward reads the sources and writes the result; backward reads them, the result and its
    # gradient, and writes the sources' gradients.
    state = TOKENS * DIM * sources[0].element_size()
    return {"deepfast": deepfast, "torch": plain, "bytes": (3 * count + 3 * hops) * state}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hops", [1, 4])
@pytest.mark.parametrize("who", ["deepfast", "torch"])
def test_depth_attention(measure, dtype, hops, who):
    variants = make(dtype, hops)
    measure(variants[who], variants["bytes"], rounds=3)
