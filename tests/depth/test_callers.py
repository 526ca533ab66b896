"""What a caller of a depth connection sees: bits, dtypes, and states that are not read."""

import pytest
import torch

from deepfast.depth.schedule import block_cost, default_block
from deepfast.measure.traffic import engine_moved
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from tests.depth.stack import CONNECTIONS, DIM, EACH, Stack, history, results


@EACH
def test_bit_identical_on_any_number_of_threads(threads, name):
    stack, (y, dout) = Stack(name, layers=6, dim=37), torch.randn(2, 333, 37)
    with threads(1):
        one = results(stack, history(), y, dout)
    for n in (1, 2, 3):
        with threads(n):
            got = results(stack, history(), y, dout)
        assert all(torch.equal(got[name], one[name]) for name in one)


@EACH
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_gradients_keep_the_dtype_of_their_input(name, given, parameters):
    stack = Stack(name)
    stack.depth.to(parameters)
    found = results(stack, history(), torch.randn(3, DIM).to(given), torch.randn(3, DIM))
    assert found["out"].dtype == found["y"].dtype == given
    for key, grad in found.items():
        assert not key.startswith("depth.") or grad.dtype == parameters


@EACH
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_autocast(name, first, state_dtype):
    """Whatever the embedding is, and though layers end with a product in 16 bits."""
    make, own = CONNECTIONS[name]
    m, h = make(2, 5, state_dtype=state_dtype, **own), DepthHistory()
    y = torch.randn(3, 5, dtype=first, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        x = m(y, h)
        x = m(x @ torch.eye(5), h)
        x = m(x @ torch.eye(5), h, residual=x)
    assert h.depth_pass.states.dtype == x.dtype == (state_dtype or torch.bfloat16)
    x.sum().backward()
    assert y.grad.dtype == first
    if first == state_dtype:
        # A residual stream keeps its precision.
        stack = Stack(name)
        y, expected = y.detach().new_ones(3, DIM), stack(y.new_ones(3, DIM), history())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(stack(y, history()), expected)


@pytest.mark.parametrize(
    "options", [{"window": 5}, {"dilation": 3}, {"period": 4}, {"window": 9, "dilation": 2}]
)
@pytest.mark.parametrize("block", [1, 4, 100])
def test_a_state_outside_the_pattern_is_not_read(backend, options, block):
    """A NaN in a state reaches the rows that read it, and in backward the states that these rows
    read, and no others."""
    for bad in (1, 7):
        dlcl = DLCL(20, 5, backend=backend, **options)
        ys, h = torch.randn(21, 4, 5), DepthHistory(block=block)
        ys[bad, 1, 1] = torch.nan
        ys.requires_grad_()
        xs = torch.stack([dlcl(y, h) for y in ys.unbind()])
        rows = torch.tensor([bad in row for row in dlcl.pattern])
        assert torch.equal(xs.isnan().any(-1).any(-1), rows)
        xs.square().sum().backward()
        reached = torch.zeros(21, dtype=torch.bool)
        reached[sorted({k for row in dlcl.pattern if bad in row for k in row})] = True
        assert torch.equal(ys.grad.isnan().any(-1).any(-1), reached)
        assert dlcl.norm_weight.grad[~reached].isfinite().all()
        # Rows that do not read the bad state get a finite gradient for it: exactly zero.
        assert dlcl.weight.grad[~rows].isfinite().all()
        assert dlcl.weight.grad[~rows, bad].eq(0).all()


def test_rows_per_block(monkeypatch):
    """Near the square root; on a GPU the number that moves the fewest states. The cost is what the
    launches of a step move, but for what no block changes."""
    assert [default_block(rows) for rows in (1, 2, 8, 16, 31, 61, 101)] == [1, 2, 8, 4, 4, 8, 8]
    assert [default_block(n, "cuda") for n in (8, 13, 25, 49, 97)] == [8, 7, 5, 7, 7]
    monkeypatch.setattr(f"{block_cost.__module__}.FAR_PASS", 0)
    for rows, blocks in ((9, (2, 3, 8, 9)), (25, (5, 13)), (60, (7,))):
        for block in blocks:
            for module in (DLCL(rows - 1, 4), AttentionResiduals(rows - 1, 4)):
                moved = engine_moved(module, block) - 7 * rows
                assert moved == block_cost(rows, block, 64), (rows, block)


def test_what_three_rows_in_one_block_move():
    """Counted by hand, per row: in forward the output of a layer, its slot, the other states, and
    the input of the next layer; in backward the other states, the gradients of later rows, the
    state, the gradient of the input, its slot, and the gradient of the output."""
    assert engine_moved(DLCL(2, 4)) == (3 + 4 + 5) + (6 + 6 + 6)
    # The last state continues the one before: the last row reads that one in its place, and
    # backward passes on a gradient, which is written and read.
    blocks = AttentionResiduals(2, 4, block=2)
    assert blocks.pattern == ((0,), (0, 1), (0, 2))
    assert engine_moved(blocks) == (3 + 4 + 5) + (6 + 6 + 6)
