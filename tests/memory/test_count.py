"""LiveBytes on cases whose bytes are known, and against the allocator."""

import pytest
import torch
from torch import nn

from deepfast.measure.forms import FORMS, mixing_alone
from deepfast.memory import LiveBytes
from deepfast.nn import DLCL, TransformerEncoder

KB = 1024


def kilobyte():
    return torch.zeros(KB // 4)


def test_counts_what_is_alive_and_what_was():
    with LiveBytes() as live:
        a = kilobyte()
        assert (live.current, live.peak) == (KB, KB)
        b = kilobyte()
        assert live.current == 2 * KB
        del a
        assert (live.current, live.peak) == (KB, 2 * KB)
        del b
        assert live.current == 0
    assert (live.current, live.peak) == (0, 2 * KB)


def test_views_share_their_storage():
    with LiveBytes() as live:
        a = kilobyte()
        view = a[3:17].view(2, 7).t()
        assert live.current == KB
        del a
        assert live.current == KB
        del view
        assert live.current == 0


def test_in_place_makes_nothing_new():
    with LiveBytes() as live:
        a = kilobyte()
        a += 1
        a.mul_(2)
        torch.add(a, 1, out=a)
    assert live.peak == KB


def test_a_resize_counts():
    with LiveBytes() as live:
        a = torch.zeros(0)
        a.resize_(KB // 4)
        assert live.current == KB


def test_what_was_there_before_counts_nothing():
    a = kilobyte()
    with LiveBytes() as live:
        view = a.view(2, -1)
        view += 1
        assert live.peak == 0
        del a, view
        assert live.current == 0


def test_an_op_that_hands_back_its_input_makes_nothing_new():
    a, index = kilobyte(), torch.tensor([0])
    with LiveBytes() as live:
        b = a.contiguous()
        c = torch.index_put_(a, (index,), torch.ones(()))
        assert live.current == 0
    assert b.data_ptr() == c.data_ptr() == a.data_ptr()


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


def test_what_backward_allocates_counts():
    x = kilobyte().requires_grad_()
    inside = []

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            big = torch.zeros(16 * KB)
            inside.append(live.current)
            return grad + big[0]

    with LiveBytes() as live:
        Greedy.apply(x).sum().backward()
    assert inside[0] >= 64 * KB
    assert live.peak >= 64 * KB
    assert live.current == KB


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


def test_an_unknown_device_is_refused():
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


def step(model, x):
    model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("connection", ["residual", "dlcl"])
def test_agrees_with_the_allocator(connection, meter):
    model = TransformerEncoder(5, 32, 2, 64, dropout=0.0, connection=connection)
    x = torch.randn(3, 16, 32)
    step(model, x)
    with LiveBytes() as live:
        step(model, x)
    with meter() as allocated:
        step(model, x)
    # The allocator does not round sizes, but it also counts the kernels' scratch memory.
    assert live.peak <= allocated.peak <= live.peak * 1.02 + KB
    assert live.current == allocated.left == 0


@pytest.mark.parametrize("form", ["stack and sum", "DenseFormer form", "loop of adds"])
def test_agrees_with_the_allocator_on_the_other_forms(form, meter):
    dlcl = DLCL(7, 32)
    y = torch.randn(64, 32, requires_grad=True)
    grad = torch.randn(64, 32)

    def run():
        mixing_alone(FORMS[form], dlcl, y, grad)
        y.grad = None
        dlcl.zero_grad()

    run()
    with LiveBytes() as live:
        run()
    with meter() as allocated:
        run()
    assert live.peak <= allocated.peak <= live.peak * 1.02 + KB
    assert live.current == allocated.left == 0


def peaks(form, depths, tokens=256, dim=64):
    """Peak of the mixing alone at each depth, in states."""
    found = []
    for depth in depths:
        dlcl = DLCL(depth, dim)
        y, grad = torch.randn(tokens, dim, requires_grad=True), torch.randn(tokens, dim)
        with LiveBytes() as live:
            mixing_alone(FORMS[form], dlcl, y, grad)
        found.append(live.peak / (tokens * dim * 4))
    return found


def test_deepfast_is_linear_in_depth_and_stack_and_sum_quadratic():
    depths = (16, 32, 64)
    at_16, at_32, at_64 = peaks("deepfast", depths)
    # Mixing alone keeps a state per layer, and x and its gradient pass through.
    slope = (at_64 - at_32) / 32
    assert slope == pytest.approx((at_32 - at_16) / 16, rel=0.2)
    assert slope < 2.5
    at_16, at_32, at_64 = peaks("stack and sum", depths)
    # All stacks of a step are alive when backward begins: L^2 / 2 states.
    assert at_64 > 64 * 65 / 2
    assert (at_64 - at_32) / (at_32 - at_16) == pytest.approx(4, rel=0.15)


def test_a_module_that_is_moved_or_cast_is_followed():
    model = nn.Linear(16, 16, bias=False)
    with LiveBytes() as live:
        half = model.weight.to(torch.bfloat16)
        assert live.current == 512
        del half
    assert live.current == 0
