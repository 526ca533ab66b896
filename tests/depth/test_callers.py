"""What a caller of a depth connection sees: dtypes, shapes, strides, frozen parameters."""

import itertools

import pytest
import torch

from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import CONNECTIONS, DIM, EACH, NORMS, Stack, form, history, results


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


def test_a_residual_stream_keeps_its_precision_under_autocast():
    stack, y = Stack(), torch.randn(3, DIM)
    expected = stack(y, history())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stack(y, history()), expected)


@EACH
@pytest.mark.parametrize("shape", [(), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_dimensions(backend, name, shape):
    """No tokens too."""
    stack, y = Stack(name, backend=backend), torch.randn(*shape, DIM)
    found = results(stack, history(), y, torch.ones(*shape, DIM))
    assert found["out"].shape == found["y"].shape == y.shape
    rows = results(stack, history(), y.view(-1, DIM), torch.ones(y.numel() // DIM, DIM))
    for key, value in found.items():
        assert torch.equal(value.view(rows[key].shape), rows[key]), key
        assert y.numel() or key in ("out", "y") or value.eq(0).all()


@EACH
def test_strides_change_nothing(backend, name):
    m, y = Stack(name, 2, 19, backend=backend).depth, torch.randn(12, 19)
    wide = torch.randn(12, 40)
    wide[:, 5:24] = y
    every_other = torch.randn(24, 19)
    every_other[::2] = y

    def run(y):
        y, h = y.detach().requires_grad_(), DepthHistory(block=1)
        x = m(y, h)
        for _ in range(2):
            # The layer's output and the gradient it gets back are strided too.
            x = m(torch.cat((x, x), 1)[:, 19:].tanh(), h)
        return x, torch.autograd.grad(x.square().sum(), y)[0]

    expected = run(y)
    for view in (wide[:, 5:24], every_other[::2], y.t().contiguous().t()):
        torch.testing.assert_close(run(view), expected, rtol=0, atol=0)


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


@pytest.mark.parametrize(
    "trainable", list(itertools.product([True, False], repeat=3))[:-1], ids=str
)
@pytest.mark.parametrize("norm", [*NORMS[:-1], "relu"])
def test_frozen_parameters(backend, norm, trainable):
    options = {} if norm == "relu" else form(norm)
    stack = Stack("relu" if norm == "relu" else "dlcl", backend=backend, **options)
    y, dout = torch.randn(2, 3, DIM)
    full = results(stack, history(), y, dout)
    # RMS norms have no bias, and attention residuals have query and bias.
    for p, flag in zip(stack.depth.parameters(), trainable, strict=False):
        p.requires_grad_(flag)
    got = results(stack, history(), y, dout)
    names = [n for n, p in stack.named_parameters() if p.requires_grad]
    assert set(got) == {"out", "y", *names}
    assert all(torch.equal(got[name], full[name]) for name in got)
