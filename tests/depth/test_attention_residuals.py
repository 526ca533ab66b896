"""Attention residuals against the published equations written out."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.nn import (
    AttentionResiduals,
    DepthHistory,
    Packing,
    TransformerDecoder,
    TransformerEncoder,
)
from deepfast.nn.connections.residual import ATTENTION_RESIDUALS
from deepfast.reference import attention_residuals as reference
from tests.nn.written_out import DIM, HEADS, decoder_layer, encoder_layer, norm_of, shaken

LAYERS, FFN = 5, 16
BLOCKS = pytest.mark.parametrize("block", [None, 1, 2, 3, 5, 7])
PACKING = Packing(2, 4)


def specified(m, v, row):
    """Row ``row`` of the reference."""
    if m.block is None:
        return reference.full(v, m.query, row, m.eps)
    return reference.block(v, m.query, row, m.block, m.eps)


def learned(block, backend=None, dtype=torch.float64):
    """An AttentionResiduals with queries away from zero."""
    m = AttentionResiduals(LAYERS, DIM, block=block, backend=backend).to(dtype)
    with torch.no_grad():
        m.query.normal_()
    return m


def rows(m, v):
    history = DepthHistory()
    return [m(x, history) for x in v]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@BLOCKS
def test_is_the_equation(block, backend):
    m = learned(block, backend)
    v = [torch.randn(2, 3, DIM, dtype=torch.float64, requires_grad=True) for _ in range(LAYERS + 1)]
    got, expected = rows(m, v), [specified(m, v, row) for row in range(LAYERS + 1)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    leaves, grads = [*v, m.query], [torch.randn_like(x) for x in got]
    for a, b in zip(
        torch.autograd.grad(got, leaves, grads),
        torch.autograd.grad(expected, leaves, grads),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


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
    exact = [specified(m, [x.double() for x in v], row) for row in range(LAYERS + 1)]
    m.bfloat16()
    plain = [specified(m, v, row) for row in range(LAYERS + 1)]
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


# ---- stacks --------------------------------------------------------------------------------------


def written_out(m, x, bodies):
    """The stack's output and the inputs of its layers, by the reference."""
    v, inputs = [x], []
    for row, norm in enumerate(m.connection.norms):
        x = specified(m.connection.residuals, v, row)
        inputs.append(x)
        n = norm_of(norm, x)
        if row < len(bodies):
            v.append(bodies[row](x, n) - x)
    return n, inputs


def stack(kind, connection, **options):
    torch.manual_seed(3)
    block = 2 if connection == "block_attnres" else None
    m = kind(
        LAYERS, DIM, HEADS, FFN, connection=connection, block=block, dropout=0.0, **options
    )  # fmt: skip
    return shaken(m).double()


def compared(got, expected, leaves):
    torch.testing.assert_close(got, expected)
    dy = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory", ["keep", "lean", "leaner", "states", "history"])
@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
def test_encoder(connection, memory):
    m = stack(TransformerEncoder, connection, memory=memory)
    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    bodies = [lambda x, n, f=f: encoder_layer(f, x, n) for f in m.layers]
    expected, _ = written_out(m, x, bodies)
    compared(m(x), expected, [x, *m.parameters()])


@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
def test_decoder_at_once_and_by_steps(connection):
    m = stack(TransformerDecoder, connection).eval()
    x, memory = torch.randn(2, 2, 4, DIM, dtype=torch.float64).unbind()
    bodies = [lambda x, n, f=f: decoder_layer(f, x, n, memory) for f in m.layers]
    expected, _ = written_out(m, x, bodies)
    whole = m.forward_packed(PACKING.pack(x), PACKING, PACKING.pack(memory), PACKING)
    torch.testing.assert_close(PACKING.unpack(whole), expected)
    with torch.no_grad():
        cache = m.start(PACKING.pack(memory), PACKING)
        steps = [m.step(x[:, t], cache) for t in range(4)]
    torch.testing.assert_close(torch.stack(steps, 1), expected)


@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
def test_states_are_the_inputs_of_the_layers(connection):
    m, states = stack(TransformerEncoder, connection), []
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    m.forward_packed(PACKING.pack(x), PACKING, states=states)
    bodies = [lambda x, n, f=f: encoder_layer(f, x, n) for f in m.layers]
    _, inputs = written_out(m, x, bodies)
    for got, expected in zip(states, inputs, strict=True):
        torch.testing.assert_close(PACKING.unpack(got), expected)


@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
def test_dropout_and_autocast(connection):
    m = stack(TransformerEncoder, connection).float()
    m.connection.dropout = 0.5
    x = torch.randn(2, 4, DIM)
    assert not torch.equal(m(x), m(x))
    with torch.autocast("cpu", torch.bfloat16):
        y = m.eval()(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), m(x), rtol=0.1, atol=0.2)


def test_stacks_refuse():
    sizes = (LAYERS, DIM, HEADS, FFN)
    for options, message in (
        ({"connection": "attnres", "norm": "post"}, "'attnres' needs norm='pre', got 'post'"),
        ({"connection": "attnres", "block": 2}, "block needs connection='block_attnres'"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerEncoder(*sizes, **options)
    assert (
        TransformerEncoder(
            9, DIM, HEADS, FFN, connection="block_attnres"
        ).connection.residuals.block
        == 2
    )
