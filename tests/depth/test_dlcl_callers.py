"""What a caller of DLCL sees: dtypes, shapes, strides, frozen parameters, and what it refuses."""

import itertools

import pytest
import torch

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from tests.depth.forms import NORMS, WEIGHTS, form, normed


def test_bit_identical_on_any_number_of_threads(chain, threads):
    c = chain(12, 37, tokens=333, block=4, weight="vector")
    with threads(1):
        one = c.run(c.engine, torch.float32)
    for n in (2, 2, 3):
        with threads(n):
            got = c.run(c.engine, torch.float32)
        assert all(torch.equal(got[name], one[name]) for name in one)


def test_gradients_keep_the_dtype_of_their_input(backend):
    dlcl = DLCL(2, 5, backend=backend)
    y = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    history = DepthHistory()
    x = dlcl(torch.tanh(dlcl(y, history)), history)
    assert x.dtype == torch.bfloat16
    x.sum().backward()
    assert y.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in dlcl.parameters())


def test_weights_in_16_bits(backend):
    dlcl = DLCL(2, 5, backend=backend).bfloat16()
    y, history = torch.randn(3, 5, requires_grad=True), DepthHistory()
    x = dlcl(torch.tanh(dlcl(y, history)), history)
    x.sum().backward()
    assert x.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 for p in dlcl.parameters())


@pytest.mark.parametrize("kind", [DLCL, AttentionResiduals])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["float32", "autocast"])
def test_autocast(backend, kind, first, states):
    """Whatever the embedding is, and though layers end with a product in 16 bits."""
    m = kind(2, 5, states=states, backend=backend)
    y, history = torch.randn(3, 5, dtype=first, requires_grad=True), DepthHistory()
    with torch.autocast("cpu", torch.bfloat16):
        x = m(y, history)
        x = m(x @ torch.eye(5), history)
        x = m(x @ torch.eye(5), history, residual=x)
    dtype = {"float32": torch.float32, "autocast": torch.bfloat16}[states]
    assert history.state.states.dtype == x.dtype == dtype
    x.sum().backward()
    assert y.grad.dtype == first


def test_a_residual_stream_keeps_its_precision_under_autocast():
    dlcl, y = DLCL(2, 5), torch.randn(3, 5)

    def run():
        history = DepthHistory()
        x = dlcl(y, history)
        for _ in range(2):
            x = dlcl(x + torch.tanh(x), history)
        return x

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 1, 3, 5)])
def test_any_leading_dimensions(backend, shape):
    dlcl = DLCL(2, 5, backend=backend)
    y = torch.randn(shape, requires_grad=True)

    def run(y):
        history = DepthHistory()
        return dlcl(torch.tanh(dlcl(y, history)), history)

    x = run(y)
    assert torch.equal(x.view(-1, 5), run(y.view(-1, 5)))
    x.sum().backward()
    assert y.grad.shape == shape


def test_strides_change_nothing(backend):
    dlcl = DLCL(2, 19, backend=backend)
    y = torch.randn(12, 19)
    wide = torch.randn(12, 40)
    wide[:, 5:24] = y
    every_other = torch.randn(24, 19)
    every_other[::2] = y

    def run(y):
        y, history = y.detach().requires_grad_(), DepthHistory(block=1)
        x = dlcl(y, history)
        for _ in range(2):
            # The layer's output and the gradient it gets back are strided too.
            x = dlcl(torch.cat((x, x), 1)[:, 19:].tanh(), history)
        return x, torch.autograd.grad(x.square().sum(), y)[0]

    expected = run(y)
    for view in (wide[:, 5:24], every_other[::2], y.t().contiguous().t()):
        assert all(torch.equal(a, b) for a, b in zip(run(view), expected, strict=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("shape", [(0, 17), (2, 0, 17)])
def test_no_tokens(backend, norm, weight, shape):
    dlcl = DLCL(5, 17, backend=backend, **form(norm, weight, 17))
    y, history = torch.randn(shape, requires_grad=True), DepthHistory(block=2)
    x = dlcl(y, history)
    for _ in range(5):
        x = dlcl(torch.tanh(x), history)
    x.sum().backward()
    assert x.shape == y.grad.shape == shape
    assert all(p.grad.eq(0).all() for p in dlcl.parameters())


def test_a_state_outside_the_window_is_not_read(backend):
    """NaN in a source that is not read reaches neither a later row nor a gradient."""
    dlcl = DLCL(9, 5, window=3, backend=backend)
    ys = [torch.randn(4, 5) for _ in range(10)]
    bad = 2
    ys[bad][1, 1] = torch.nan
    for y in ys:
        y.requires_grad_()
    history = DepthHistory(block=4)
    xs = [dlcl(y, history) for y in ys]
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
@pytest.mark.parametrize("norm", NORMS[:-1])
def test_frozen_parameters(chain, backend, norm, trainable):
    c = chain(9, 17, block=4, backend=backend, **normed(norm))
    full = c.run(c.engine, torch.float32)
    # RMS norms have no bias.
    for p, flag in zip(c.dlcl.parameters(), trainable, strict=False):
        p.requires_grad_(flag)
    got = c.run(c.engine, torch.float32)
    names = [n for n, p in c.dlcl.named_parameters() if p.requires_grad]
    assert set(got) == {"out", "embedding", "scales", *names}
    for name in got:
        assert torch.equal(got[name], full[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "both"}, "norm must be one of .*got 'both'"),
        ({"norm_kind": "batch"}, "norm_kind must be one of .*got 'batch'"),
        ({"weight": "matrix"}, "weight must be one of"),
        ({"init": "zero"}, "init must be one of"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, got 0"),
        ({"num_layers": 1.5}, "num_layers must be a whole number of at least 1, got 1.5"),
        ({"dim": 0}, "dim must be a whole number of at least 1, got 0"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window": 2.5}, "window must be a whole number of at least 1, got 2.5"),
        ({"dilation": 0}, "dilation must be a whole number of at least 1, got 0"),
        ({"softmax": "no"}, "softmax must be True or False, got 'no'"),
        ({"eps": -1.0}, "eps must be a number of at least 0, got -1.0"),
        ({"period": 0}, "period must be a whole number of at least 1"),
        ({"weight": "group"}, r"weight='group' needs groups, from 1 to 4, got None$"),
        ({"groups": 2}, "groups=2 needs weight='group', got weight='scalar'$"),
        ({"weight": "group", "groups": 5}, "groups must be between 1 and 4, got 5"),
    ],
)
def test_refuses_options(change, message):
    with pytest.raises(ValueError, match=message):
        DLCL(**({"num_layers": 2, "dim": 4} | change))


@pytest.mark.parametrize(
    ("y", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "must be a tensor, got list"),
        (torch.ones(3, 5), {}, ValueError, r"must be \(..., 4\), got \(3, 5\)"),
        (torch.ones(3, 4, device="meta"), {}, ValueError, "the input must be on cpu, got meta"),
        (torch.ones(3, 4), {"residual": torch.ones(2, 4)}, ValueError, "residual must have"),
        (torch.ones(3, 4), {"dropout_p": 1.5}, ValueError, "between 0 and 1"),
        (torch.ones(3, 4), {"dropout_p": -0.5}, ValueError, "between 0 and 1"),
        (torch.ones(3, 4), {"dropout_p": 0.5, "seed": 1.5}, TypeError, "DLCL: seed must be an int"),
        (torch.ones(3, 4).int(), {}, ValueError, "torch.int32"),
    ],
)
def test_refuses_inputs(y, options, error, message):
    with pytest.raises(error, match=message):
        DLCL(2, 4)(y, DepthHistory(), **options)


def test_refuses_a_history_of_another_kind():
    with pytest.raises(TypeError, match="history must be a DepthHistory, got list"):
        DLCL(2, 4)(torch.ones(3, 4), [])
