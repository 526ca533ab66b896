"""LiveBytes on cases whose bytes are known, and against the allocator."""

import pytest
import torch

from deepfast.memory import LiveBytes
from deepfast.nn import TransformerEncoder

KB = 1024


def kilobyte():
    return torch.zeros(KB // 4)


def test_counts_what_is_alive_and_what_was():
    with LiveBytes() as live:
        a = kilobyte()
        assert (live.current, live.peak) == (KB, KB)
        # A view has the storage of its base.
        view = a[3:17].view(2, 7).t()
        b = torch.zeros(0).resize_(KB // 4)
        assert live.current == 2 * KB
        del a
        assert (live.current, live.peak) == (2 * KB, 2 * KB)
        del b, view
        assert live.current == 0
    assert (live.current, live.peak) == (0, 2 * KB)


@pytest.mark.parametrize("run", [
    lambda a: a.view(2, -1).add_(1), lambda a: torch.add(a, 1, out=a), lambda a: a.contiguous(),
    lambda a: torch.index_put_(a, (torch.tensor([0]),), torch.ones(())),
])  # fmt: skip
def test_what_shares_a_storage_makes_nothing_new(run):
    before = kilobyte()
    with LiveBytes() as live:
        run(before)
        assert live.current == 0
        inside = kilobyte()
        found = run(inside)
        assert live.current == KB
        del before, inside, found
        assert live.current == 0


def test_saved_tensors_go_in_backward():
    x = kilobyte().requires_grad_()
    with LiveBytes() as live:
        y = x.exp().exp().sum()
        # exp keeps its result: two of them, and the sum.
        assert live.current == 2 * KB + 4
        y.backward()
        del y
        assert live.current == KB  # the gradient
        assert live.peak >= 3 * KB
        x.grad = None
        assert live.current == 0


def test_an_exception_leaves_the_count_and_torch_in_order():
    live, kept = LiveBytes(), []

    def fail():
        with live:
            kept.append(kilobyte())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (live.current, live.peak) == (KB, KB)
    # Tensors freed after the block change nothing, and new ones are not counted.
    kept.clear()
    kilobyte()
    assert (live.current, live.peak) == (KB, KB)


def test_counts_may_nest_and_run_again():
    with LiveBytes() as outer:
        a = kilobyte()
        with LiveBytes() as inner:
            b = kilobyte()
        assert inner.current == KB
        assert outer.current == 2 * KB
        with pytest.raises(RuntimeError, match="already running"):
            outer.__enter__()
        del a, b
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
