"""MUDD against the published equations written out."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.nn import (
    MUDD,
    DepthHistory,
    MUDDHistory,
    Packing,
    TransformerEncoder,
)
from deepfast.reference import mudd as reference
from tests.nn.written_out import DIM, HEADS, shaken

LAYERS, FFN = 4, 16
PACKING = Packing(2, 4)


def learned(layers, dim, streams=4, dtype=torch.float64, backend=None):
    """A MUDD with weights of each token away from their start."""
    return shaken(MUDD(layers, dim, streams=streams, backend=backend)).to(dtype)


def body(k, streams):
    """A layer that treats its streams differently."""
    return sum(torch.sin((s + 1) * x + k) for s, x in enumerate(streams))


def fused(m, y, bodies=body, **options):
    history = MUDDHistory()
    x = m(y, history)
    streams = (x,) * m.streams
    for k in range(m.num_layers):
        x = m(bodies(k, streams), history, **options)
        streams = x.unbind(-2) if k + 1 < m.num_layers else (x,)
    return x


def specified(m, y, bodies=body):
    states, streams = [y], (y,) * m.streams
    for k in range(m.num_layers):
        states.append(bodies(k, streams))
        streams = reference.row(states, m.up[k], m.down[k], m.bias[k], m.eps)
    return streams[0]


def gradients(out, leaves):
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("dim", [1, 17, 64])
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_is_the_equation(exact_backend, layers, dim, streams):
    m = learned(layers, dim, streams, backend=exact_backend)
    y = torch.randn(2, 3, dim, dtype=torch.float64, requires_grad=True)
    leaves = [y, *m.parameters()]
    got, expected = gradients(fused(m, y), leaves), gradients(specified(m, y), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision(tolerances):
    m = learned(LAYERS, 64, dtype=torch.float32)
    y = torch.randn(9, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = fused(m, y.float())
    assert got.dtype == torch.bfloat16
    exact = specified(m.double(), y.double())
    plain = specified(m.bfloat16(), y)
    tolerances.assert_accurate(got.detach(), plain.detach(), exact.detach(), torch.bfloat16, "out")


@pytest.mark.parametrize("ignored", [0, 2])
def test_a_layer_that_ignores_streams_or_its_input(ignored):
    """Rows without a gradient, and a layer whose output does not depend on the rows below."""
    m = learned(LAYERS, 5)
    y = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def some(k, streams):
        return torch.ones(3, 5, dtype=torch.float64) if k == ignored else streams[0].sin()

    leaves = [y, *m.parameters()]
    got = torch.autograd.grad(fused(m, y, some).sum(), leaves, materialize_grads=True)
    want = torch.autograd.grad(specified(m, y, some).sum(), leaves, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_backward_and_a_partial_one():
    m = learned(LAYERS, 5)
    y = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    out = fused(m, y).square().sum()
    partial = torch.autograd.grad(out, list(m.bias[2:]), retain_graph=True)
    first = torch.autograd.grad(out, [y, *m.parameters()], retain_graph=True)
    second = torch.autograd.grad(out, [y, *m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(partial, second[-len(partial) :], strict=True))


@pytest.mark.parametrize("frozen", ["embedding", "parameters"])
def test_frozen(frozen):
    m = learned(LAYERS, 5)
    y = torch.randn(3, 5, dtype=torch.float64, requires_grad=frozen != "embedding")
    m.requires_grad_(frozen != "parameters")
    leaves = [p for p in (y, *m.parameters()) if p.requires_grad]
    for a, b in zip(
        gradients(fused(m, y), leaves), gradients(specified(m, y), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_whole_stack_in_one_checkpoint():
    m = learned(LAYERS, 5)
    y = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    leaves = [y, *m.parameters()]
    again = gradients(checkpoint(lambda y: fused(m, y), y, use_reentrant=False), leaves)
    for a, b in zip(again, gradients(fused(m, y), leaves), strict=True):
        assert torch.equal(a, b)


def test_memory_is_one_state_and_one_gradient_for_each_layer(meter):
    """Forward keeps the states and the weights; backward one gradient each and some for a row."""
    layers, tokens, dim = 12, 512, 256
    m = learned(layers, dim, dtype=torch.float32)
    y = torch.randn(tokens, dim, requires_grad=True)
    each = zip(m.up, m.bias, strict=True)
    weights = sum(4 * tokens * (up.shape[0] + bias.numel()) for up, bias in each)

    class Idle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *streams):
            return streams[-1].clone()

        @staticmethod
        def backward(ctx, dy):
            return dy, dy, dy, dy

    with meter() as live:
        fused(m, y, lambda _, streams: Idle.apply(*streams)).sum().backward()
    parameters = sum(p.nbytes for p in m.parameters())
    assert live.peak < 2 * (layers + 1) * y.nbytes + weights + parameters + 14 * y.nbytes


def test_a_second_derivative_is_refused():
    m, history, x = MUDD(1, DIM), MUDDHistory(), torch.randn(3, DIM, requires_grad=True)
    m(x, history)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(m(x, history).sum(), x, create_graph=True)


def test_a_backward_inside_another_one_is_an_error():
    m = learned(2, DIM)
    x, history = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True), MUDDHistory()
    m(x, history)
    y = m(body(0, [x]), history)
    loss = m(body(1, y.unbind(-2)), history).sum()
    inner = []

    def again(_):
        if not inner:
            inner.append(None)
            torch.autograd.grad(loss, x, retain_graph=True)

    y.register_hook(again)
    with pytest.raises(RuntimeError, match=r"MUDD: another backward pass .* one after the other"):
        torch.autograd.grad(loss, x, retain_graph=True)


def test_refuses_what_would_lose_gradients_or_states():
    m, other = learned(2, DIM), learned(2, DIM)
    y, history = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True), MUDDHistory()
    for wrong in (None, DepthHistory()):
        with pytest.raises(TypeError, match="MUDD: history must be a MUDDHistory, got"):
            m(y, wrong)
    for given in ({"residual": y}, {"dropout_p": 0.1}):
        with pytest.raises(ValueError, match="the first push takes no residual and no dropout_p"):
            m(y, history, **given)
    m(y, history)
    with pytest.raises(RuntimeError, match="MUDD: this history belongs to another stack"):
        other(y, history)
    # The gradients of the states below this push would be lost.
    with torch.no_grad(), pytest.raises(RuntimeError, match="MUDD: grad mode changed"):
        m(y, history)
    assert len(history.states) == 1


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_compiles_to_one_graph(whole):
    """The connection alone, and in a stack."""
    torch._dynamo.reset()
    m = learned(2, DIM)
    if whole:
        m = TransformerEncoder(4, DIM, HEADS, 16, connection="mudd", dropout=0.0).double()
    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    run = m if whole else lambda x: fused(m, x)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager" if whole else "eager")
    leaves = [x, *m.parameters()]
    for a, b in zip(gradients(compiled(x), leaves), gradients(run(x), leaves), strict=True):
        torch.testing.assert_close(a, b)
