"""Attention residuals against the published equations written out."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.nn import AttentionResiduals, DepthHistory
from tests.nn.written_out import DIM, attention_row

LAYERS = 5
BLOCKS = pytest.mark.parametrize("block", [None, 1, 2, 3, 5, 7])


def learned(block=None, backend=None, dtype=torch.float64, **options):
    """An AttentionResiduals with queries away from zero."""
    m = AttentionResiduals(LAYERS, DIM, block=block, backend=backend, **options).to(dtype)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(torch.randn_like(p))
    return m


def rows(m, v, **options):
    history = DepthHistory(**options)
    return [m(x, history) for x in v]


def values(m):
    return [torch.randn(2, 3, DIM, dtype=torch.float64, requires_grad=True) for _ in range(m.rows)]


def assert_equal_gradients(got, expected, leaves):
    grads = [torch.randn_like(x) for x in got]
    for a, b in zip(
        torch.autograd.grad(got, leaves, grads, retain_graph=True),
        torch.autograd.grad(expected, leaves, grads, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


FORMS = [
    {"scale": 0.5, "norm_weight": True},
    {"window": 1},
    {"window": 3, "norm_weight": True},
    {"weights": "relu"},
    {"weights": "relu", "window": 2, "scale": 2.0},
    {"weights": "relu", "block": 2},
    *({"block": block} for block in (None, 1, 2, 3, 5, 7)),
]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("reads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_is_the_equation(form, reads, backend):
    m = learned(backend=backend, reads=reads, **form)
    assert m.rows == reads * LAYERS + 1
    v = values(m)
    got, expected = rows(m, v), [attention_row(m, v, row) for row in range(m.rows)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert_equal_gradients(got, expected, [*v, *m.parameters()])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mean_weights(form):
    """Each row's sum of sources, weighed for each of the tokens: here a single one."""
    m = learned(**form)
    v = [x[0, :1] for x in values(m)]
    means = m.mean_weights(v)
    states = []
    for x, running in zip(v, m.running, strict=True):
        states.append(x + states[-1] if running else x)
    for row, x in enumerate(rows(m, v)):
        torch.testing.assert_close(x, (means[row].unsqueeze(-1) * torch.cat(states)).sum(0, True))
        assert not means[row, row + 1 :].any()


def test_mean_weights_of_something_else():
    m, v = AttentionResiduals(1, DIM), torch.randn(3, DIM)
    for pushed, message in (
        (None, "pushed must be a list of tensors, got NoneType"),
        ([v], "pushed must hold 2 tensors, got 1"),
        ([v, 1], r"pushed\[1\] must be a tensor, got int"),
        ([v, v[:2]], r"pushed\[1\] must have pushed\[0\]'s shape"),
        ([v[:, 1:]] * 2, "the input must be"),
        ([v[:0]] * 2, "pushed must have tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^AttentionResiduals: {message}"):
            m.mean_weights(pushed)


@BLOCKS
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("top", "bottom"), [(9, 4), (10, 0), (6, 2), (5, 4)])
def test_gradient_between_two_rows(block, inplace, top, bottom):
    m, x = learned(block, reads=2), torch.randn(3, DIM, dtype=torch.float64)

    def chain(row):
        xs = [row(0, x)]
        for k in range(1, m.rows):
            xs.append(row(k, torch.tanh(xs[-1])))
        return xs

    history, v = DepthHistory(inplace=inplace, block=4), []
    got = chain(lambda k, y: m(y, history))

    def literal(k, y):
        v.append(y)
        return attention_row(m, v, k)

    want = chain(literal)
    for xs in (got, want):
        (grad,) = torch.autograd.grad(xs[top].square().sum(), xs[bottom])
        xs.append(grad)
    torch.testing.assert_close(got[-1], want[-1])


@BLOCKS
def test_a_second_backward_needs_the_states(block):
    m = learned(block, reads=2)
    v = values(m)
    got, expected = rows(m, v, inplace=False), [attention_row(m, v, k) for k in range(m.rows)]
    for _ in range(2):
        assert_equal_gradients(got, expected, [*v, m.query])
    loss = sum(x.sum() for x in rows(m, v))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"DepthHistory\(inplace=False\)"):
        loss.backward()


@BLOCKS
def test_two_open_passes(block):
    m = learned(block)
    one, two = values(m), values(m)
    passes = [(rows(m, v), v) for v in (one, two)]
    for got, v in passes:
        expected = [attention_row(m, v, k) for k in range(m.rows)]
        assert_equal_gradients(got, expected, [*v, m.query])


@BLOCKS
def test_begins_as_a_mean(block):
    m = AttentionResiduals(LAYERS, DIM, block=block)
    v = list(torch.randn(LAYERS + 1, 4, DIM))
    size = 1 if block is None else block
    for row, x in enumerate(rows(m, v)):
        sums = [v[0], *(sum(v[k + 1 : min(k + size, row) + 1]) for k in range(0, row, size))]
        torch.testing.assert_close(x, sum(sums) / len(sums))


@pytest.mark.parametrize("block", [None, 2])
def test_reruns_are_bit_identical(block):
    m = learned(block, dtype=torch.float32)
    v = [torch.randn(70, DIM).requires_grad_() for _ in range(LAYERS + 1)]

    def run():
        out = rows(m, v)
        return [*out, *torch.autograd.grad(sum(x.square().sum() for x in out), [*v, m.query])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("block", [None, 2])
def test_half_precision(block, tolerances):
    m = learned(block, dtype=torch.float32)
    v = list(torch.randn(LAYERS + 1, 9, DIM).bfloat16())
    got = rows(m, v)
    m.double()
    exact = [attention_row(m, [x.double() for x in v], row) for row in range(LAYERS + 1)]
    m.bfloat16()
    plain = [attention_row(m, v, row) for row in range(LAYERS + 1)]
    for row, (a, p, e) in enumerate(zip(got, plain, exact, strict=True)):
        assert a.dtype == torch.bfloat16
        tolerances.assert_accurate(a, p, e, torch.bfloat16, f"row {row}")


@pytest.mark.parametrize("block", [None, 2])
def test_compiles_to_one_graph(block):
    torch._dynamo.reset()
    m = learned(block)
    v = [torch.randn(4, DIM, dtype=torch.float64).requires_grad_() for _ in range(LAYERS + 1)]
    run = torch.compile(lambda: rows(m, v), fullgraph=True, backend="aot_eager")
    got, expected = run(), rows(m, v)
    leaves = [*v, m.query]
    for out in (got, expected):
        out.extend(torch.autograd.grad(sum(x.square().sum() for x in out), leaves))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_refuses():
    for options, message in (({"block": 0}, "block must be a whole number of at least 1, got 0"),
                             ({"eps": math.nan}, "eps must be a number of at least 0, got nan"),
                             ({"num_layers": 0}, "num_layers must be")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            AttentionResiduals(**{"num_layers": 2, "dim": DIM} | options)
    for options, message in (
        ({"block": 2, "window": 2}, "expected block or window, got both"),
        ({"weights": "linear"}, "weights"),
        ({"scale": math.inf}, "scale must be a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionResiduals(2, DIM, **options)
    m, history = AttentionResiduals(1, DIM), DepthHistory()
    with pytest.raises(ValueError, match=rf"the input must be \(\.\.\., {DIM}\), got \(3, 4\)"):
        m(torch.randn(3, 4), history)
    for given in ([1], None):
        with pytest.raises(TypeError, match="the layer's output must be a tensor, got"):
            m(given, history)
    with pytest.raises(ValueError, match="want_x=False needs out_norm, got None"):
        m(torch.randn(3, DIM), history, want_x=False)
    for other in (None, []):
        with pytest.raises(TypeError, match="history must be a DepthHistory, got"):
            m(torch.randn(3, DIM), other)
    for _ in range(2):
        m(torch.randn(3, DIM), history)
    with pytest.raises(RuntimeError, match="1 layers push 2 states, and this history has them all"):
        m(torch.randn(3, DIM), history)
    with pytest.raises(RuntimeError, match="belongs to another stack"):
        AttentionResiduals(3, DIM)(torch.randn(3, DIM), history)


@BLOCKS
def test_a_push_that_is_refused_changes_nothing(block):
    m, v = learned(block, dtype=torch.float32), list(torch.randn(LAYERS + 1, 4, DIM))
    expected, history = rows(m, v), DepthHistory()
    for k, x in enumerate(v):
        if k:
            for bad in (x[:1], x.double()):
                with pytest.raises(ValueError, match="states of a pass must be alike"):
                    m(bad, history)
        assert torch.equal(m(x, history), expected[k])


@BLOCKS
def test_checkpointed_layers(block):
    m, layers = (
        learned(block),
        torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(LAYERS)),
    )
    layers.double()
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)

    def gradients(run):
        history = DepthHistory()
        y = m(x, history)
        for layer in layers:
            y = m(run(lambda y, layer=layer: torch.tanh(layer(y)), y), history)
        return torch.autograd.grad(y.square().sum(), [x, m.query, *layers.parameters()])

    again = partial(checkpoint, use_reentrant=False)
    for a, b in zip(gradients(again), gradients(lambda f, y: f(y)), strict=True):
        assert torch.equal(a, b)


@BLOCKS
def test_checkpointed_pushes(block):
    """With the index a push may be repeated."""
    m = learned(block)
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)

    def gradients(run):
        history, y = DepthHistory(block=2), x
        for k in range(LAYERS + 1):
            y = run(lambda y, k=k: torch.tanh(m(y, history, index=k)), y)
        return torch.autograd.grad(y.square().sum(), [x, m.query])

    again = partial(checkpoint, use_reentrant=False)
    for a, b in zip(gradients(again), gradients(lambda f, y: f(y)), strict=True):
        assert torch.equal(a, b)


@BLOCKS
def test_a_whole_stack_in_one_checkpoint(block):
    m = learned(block)
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)

    def stack(y):
        history = DepthHistory()
        for _ in range(LAYERS + 1):
            y = torch.tanh(m(y, history))
        return y

    leaves = [x, m.query]
    got = torch.autograd.grad(checkpoint(stack, x, use_reentrant=False).square().sum(), leaves)
    want = torch.autograd.grad(stack(x).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("weights", ["softmax", "relu"])
def test_no_tokens(weights):
    m, history = AttentionResiduals(5, DIM, weights=weights), DepthHistory(block=2)
    x = y = torch.randn(0, DIM, requires_grad=True)
    for _ in range(6):
        y = m(torch.tanh(y), history)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, DIM)
    assert all(p.grad.eq(0).all() for p in m.parameters())


def test_a_half_precision_query_is_scaled_in_fp32():
    m = AttentionResiduals(2, DIM, scale=100.0).half()
    with torch.no_grad():
        m.query.fill_(1000)
    x, history = torch.randn(3, DIM).half(), DepthHistory()
    assert all(m(x, history).isfinite().all() for _ in range(3))
