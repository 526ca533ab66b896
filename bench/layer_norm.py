"""Layer normalisation, forward and backward, beside torch's."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import ops

TOKENS, DIM = 8192, 512


def make(dtype: torch.dtype, tokens: int = TOKENS, dim: int = DIM) -> dict:
    """A step of each implementation on the same numbers, and the bytes a step has to move."""
    x = torch.randn(tokens, dim).to(dtype).requires_grad_()
    grad = torch.randn(tokens, dim).to(dtype)
    weight, bias = torch.ones(dim, requires_grad=True), torch.zeros(dim, requires_grad=True)
    # On a CPU torch takes parameters in the dtype of x or in fp32; the dtype of x is faster.
    own = [p.detach().to(dtype).requires_grad_() for p in (weight, bias)]

    # torch.autograd.grad, not backward: inside a model x is no leaf and no gradient is accumulated.
    def deepfast():
        torch.autograd.grad(ops.layer_norm(x, weight, bias), (x, weight, bias), grad)

    def plain():
        torch.autograd.grad(F.layer_norm(x, (dim,), *own), (x, *own), grad)

    return {
        "deepfast": deepfast,
        "torch": plain,
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        "bytes": 5 * x.numel() * x.element_size(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", ["deepfast", "torch"])
def test_layer_norm(measure, dtype, who):
    variants = make(dtype)
    measure(variants[who], variants["bytes"], rounds=15)
