"""LiveBytes on cases whose bytes are known, and against the allocator."""

import contextlib

import pytest
import torch

from deepfast.memory import LiveBytes
from deepfast.nn import TransformerEncoder

KB = 1024
SHARING = [
    lambda a: a.view(2, -1).add_(1), lambda a: torch.add(a, 1, out=a), lambda a: a.contiguous(),
    lambda a: torch.index_put_(a, (torch.tensor([0]),), torch.ones(())),
    lambda a: a[3:17].view(2, 7).t(),
]  # fmt: skip
"""Results with the storage of their argument."""


def kilobyte():
    return torch.zeros(KB // 4)


def test_counts_each_storage_that_is_alive_once():
    before = kilobyte()
    with LiveBytes() as live:
        a = kilobyte()
        assert (live.current, live.peak) == (KB, KB)
        shared = [run(x) for run in SHARING for x in (before, a)]
        assert live.current == KB
        b = torch.zeros(0).resize_(KB // 4)
        assert (live.current, live.peak) == (2 * KB, 2 * KB)
        del a, before
        assert live.current == 2 * KB
        del b, shared
        assert live.current == 0
    assert (live.current, live.peak) == (0, 2 * KB)


def test_a_count_ends_with_its_block_and_may_nest_and_run_again():
    outer, inner, kept = LiveBytes(), LiveBytes(), []
    with contextlib.suppress(ZeroDivisionError), outer:
        kept.append(kilobyte())
        with inner:
            kept.append(kilobyte())
        with pytest.raises(RuntimeError, match="already running"):
            outer.__enter__()
        raise ZeroDivisionError
    # Tensors freed after the block change nothing, and new ones are not counted.
    kept.clear()
    kilobyte()
    assert (inner.current, inner.peak) == (KB, KB)
    assert (outer.current, outer.peak) == (2 * KB, 2 * KB)
    with inner:
        kilobyte()
    assert (inner.current, inner.peak) == (0, KB)
    with pytest.raises(ValueError, match="cpu or cuda, got meta"):
        LiveBytes("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_the_allocator():
    before = torch.zeros(1 << 20, device="cuda")
    with LiveBytes("cuda") as live:
        a = torch.zeros(1 << 20, device="cuda")
        del a
        assert live.current == 0
    assert live.peak == 4 << 20
    assert before.numel() == 1 << 20


@pytest.mark.parametrize("connection", ["residual", "dlcl", "attnres"])
def test_agrees_with_the_allocator(connection, meter):
    model = TransformerEncoder(5, 32, 2, 64, dropout=0.0, connection=connection)
    x = torch.randn(3, 16, 32)

    def run():
        model(x).square().mean().backward()
        model.zero_grad()

    run()
    with LiveBytes() as live:
        run()
    with meter() as allocated:
        run()
    # The allocator does not round sizes, but it also counts the kernels' scratch memory.
    assert live.peak <= allocated.peak <= live.peak * 1.02 + KB
    assert live.current == allocated.left == 0
