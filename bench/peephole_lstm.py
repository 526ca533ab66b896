"""An LSTM layer with peepholes, forward and backward, beside a loop of torch's ops."""

import pytest
import torch
from torch import Tensor

from deepfast import ops
from deepfast.reference.peephole_lstm import cell

STEPS, BATCH = 30, 32


def loop_of_ops(f: Tensor, weight: Tensor, peephole: Tensor) -> Tensor:
    """One product and the cell, step by step, on whole sentences: h (T, B, H)."""
    h = c = f.new_zeros(f.shape[1], f.shape[2] // 4)
    out = []
    for f_t in f:
        h, c, _ = cell(torch.addmm(f_t, h, weight), c, peephole)
        out.append(h)
    return torch.stack(out)


def make(dim: int, dtype: torch.dtype, steps: int = STEPS, batch: int = BATCH) -> dict:
    """A step of each implementation on the same numbers."""
    f = torch.randn(steps, batch, 4 * dim).to(dtype).requires_grad_()
    weight = (torch.randn(dim, 4 * dim) / dim**0.5).to(dtype).requires_grad_()
    peephole = torch.randn(3, dim).to(dtype).requires_grad_()
    grad = torch.randn(steps, batch, dim).to(dtype)
    leaves = (f, weight, peephole)
    return {
        "deepfast": lambda: torch.autograd.grad(ops.peephole_lstm(*leaves)[0], leaves, grad),
        "loop of ops": lambda: torch.autograd.grad(loop_of_ops(*leaves), leaves, grad),
    }


@pytest.mark.parametrize("dim", [128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", ["deepfast", "loop of ops"])
def test_peephole_lstm(benchmark, dim, dtype, who):
    benchmark.pedantic(make(dim, dtype)[who], rounds=9, warmup_rounds=2)
