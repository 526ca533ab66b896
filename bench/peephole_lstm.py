"""An LSTM layer with peepholes, forward and backward, beside a loop of torch's ops."""

import pytest
import torch
from torch import Tensor

from deepfast import ops
from deepfast.reference.peephole_lstm import cell

STEPS, BATCH = 30, 32
WHO = ("deepfast", "loop of ops", "deepfast, lengths", "loop of ops, lengths")


def loop_of_ops(
    f: Tensor, weight: Tensor, peephole: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """One product and the cell, step by step: h (T, B, H). After the end of a sentence h is 0 and
    the state does not change. Without ``lengths`` (B,) all sentences have T words."""
    h = c = f.new_zeros(f.shape[1], f.shape[2] // 4)
    out = []
    for t, f_t in enumerate(f):
        before = h, c
        h, c, _ = cell(torch.addmm(f_t, h, weight), c, peephole)
        out.append(h)
        if lengths is not None:
            live = (t < lengths).unsqueeze(1)
            out[-1] = torch.where(live, h, 0)
            h, c = (torch.where(live, new, old) for new, old in zip((h, c), before, strict=True))
    return torch.stack(out)


def make(dim: int, dtype: torch.dtype, steps: int = STEPS, batch: int = BATCH) -> dict:
    """A step of each implementation on the same numbers: on full sentences, and on sentences of T /
    2 to T words."""
    f = torch.randn(steps, batch, 4 * dim).to(dtype).requires_grad_()
    weight = (torch.randn(dim, 4 * dim) / dim**0.5).to(dtype).requires_grad_()
    peephole = torch.randn(3, dim).to(dtype).requires_grad_()
    grad = torch.randn(steps, batch, dim).to(dtype)
    lengths = torch.randint(steps // 2, steps + 1, (batch,))
    leaves = (f, weight, peephole)
    forms = {
        "deepfast": lambda: ops.peephole_lstm(*leaves)[0],
        "loop of ops": lambda: loop_of_ops(*leaves),
        "deepfast, lengths": lambda: ops.peephole_lstm(*leaves, lengths=lengths)[0],
        "loop of ops, lengths": lambda: loop_of_ops(*leaves, lengths),
    }
    return {
        who: lambda form=form: torch.autograd.grad(form(), leaves, grad)
        for who, form in forms.items()
    }


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", WHO)
def test_peephole_lstm(benchmark, dim, dtype, who):
    benchmark.pedantic(make(dim, dtype)[who], rounds=9, warmup_rounds=2)
