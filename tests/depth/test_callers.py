"""What a caller of a depth connection sees: bits, dtypes, and states that are not read."""

import pytest
import torch

from deepfast.nn import DLCL, DepthHistory
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
@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_gradients_keep_the_dtype_of_their_input(backend, name, given, parameters):
    stack = Stack(name, backend=backend)
    stack.depth.to(parameters)
    found = results(stack, history(), torch.randn(3, DIM).to(given), torch.randn(3, DIM))
    assert found["out"].dtype == found["y"].dtype == given
    for key, grad in found.items():
        assert not key.startswith("depth.") or grad.dtype == parameters


@EACH
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_autocast(backend, name, first, state_dtype):
    """Whatever the embedding is, and though layers end with a product in 16 bits."""
    make, own = CONNECTIONS[name]
    m, h = make(2, 5, state_dtype=state_dtype, backend=backend, **own), DepthHistory()
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
        stack = Stack(name, backend=backend)
        y, expected = y.detach().new_ones(3, DIM), stack(y.new_ones(3, DIM), history())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(stack(y, history()), expected)


def test_a_state_outside_the_window_is_not_read(backend):
    """NaN in a source that is not read reaches neither a later row nor a gradient."""
    dlcl, bad = DLCL(9, 5, window=3, backend=backend), 2
    ys = [torch.randn(4, 5) for _ in range(10)]
    ys[bad][1, 1] = torch.nan
    for y in ys:
        y.requires_grad_()
    h = history()
    xs = [dlcl(y, h) for y in ys]
    assert [bool(x.isnan().any()) for x in xs] == [bad <= row < bad + 3 for row in range(10)]
    torch.stack([x for row, x in enumerate(xs) if not bad <= row < bad + 3]).sum().backward()
    for k, y in enumerate(ys):
        assert k == bad or torch.isfinite(y.grad).all(), k
    column = torch.arange(10) == bad
    assert torch.isfinite(dlcl.weight.grad[:, ~column]).all()
    assert torch.isfinite(dlcl.norm_weight.grad[~column]).all()
    # Rows that never read the bad state get a finite gradient for it: exactly zero.
    assert dlcl.weight.grad[bad + 3 :, bad].eq(0).all()
