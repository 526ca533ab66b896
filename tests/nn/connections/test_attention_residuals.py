"""Stacks with attention residuals, one and two reads a layer, against the written-out form."""

import pytest
import torch

from deepfast.memory import POLICIES
from deepfast.memory.policies import ATTENTION_RESIDUALS
from deepfast.nn import DepthHistory, Packing, TransformerDecoder, TransformerEncoder
from deepfast.reference.dropout import dropout
from tests.nn.written_out import (
    DIM,
    HEADS,
    attention_row,
    decoder_layer,
    encoder_layer,
    norm_of,
    shaken,
    sublayers,
)

LAYERS, FFN = 5, 16
PACKING = Packing(2, 4)
CONNECTIONS = pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
READS = pytest.mark.parametrize("reads", [1, 2])


def written_out(m, x, encoded=None):
    """The stack's output and the inputs of its layers or sublayers, by the reference."""
    v, inputs, bodies = [x], [], []
    for layer in m.layers:
        if m.connection.reads > 1:
            bodies += [lambda _, n, f=f: f(n) for f in sublayers(layer, encoded)]
        elif encoded is None:
            bodies.append(lambda x, n, f=layer: encoder_layer(f, x, n) - x)
        else:
            bodies.append(lambda x, n, f=layer: decoder_layer(f, x, n, encoded) - x)
    for row, norm in enumerate(m.connection.norms):
        x = attention_row(m.connection.residuals, v, row)
        inputs.append(x)
        n = norm_of(norm, x)
        if row < len(bodies):
            v.append(bodies[row](x, n))
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


@pytest.mark.parametrize("memory", POLICIES)
@CONNECTIONS
@READS
def test_encoder(connection, reads, memory):
    m = stack(TransformerEncoder, connection, reads=reads, memory=memory)
    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    compared(m(x), written_out(m, x)[0], [x, *m.parameters()])


@pytest.mark.parametrize("memory", POLICIES)
@CONNECTIONS
@READS
def test_decoder(connection, reads, memory):
    m = stack(TransformerDecoder, connection, reads=reads, memory=memory)
    x, encoded = torch.randn(2, 2, 4, DIM, dtype=torch.float64).unbind()
    leaves = [x.requires_grad_(), encoded.requires_grad_(), *m.parameters()]
    compared(m(x, encoded), written_out(m, x, encoded)[0], leaves)


@CONNECTIONS
@READS
def test_states_are_the_inputs_of_the_layers(connection, reads):
    m, states = stack(TransformerEncoder, connection, reads=reads), []
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    m.forward_packed(PACKING.pack(x), PACKING, states=states)
    _, inputs = written_out(m, x)
    for got, expected in zip(states, inputs[::reads], strict=True):
        torch.testing.assert_close(PACKING.unpack(got), expected)


@CONNECTIONS
@READS
def test_dropout_masks_are_those_of_the_reference(connection, reads):
    """The boundary drops what a layer or sublayer returns, with the seed of its row."""
    m = stack(TransformerEncoder, connection, reads=reads)
    m.connection.dropout = p = 0.5
    seen = []
    hook = m.connection.residuals.register_forward_pre_hook(
        lambda _, args, given: seen.append((args[1], given)), with_kwargs=True
    )
    with hook:
        torch.manual_seed(5)
        m(torch.randn(2, 4, DIM, dtype=torch.float64))
    assert [given["dropout_p"] for _, given in seen] == [0, *[p] * (reads * LAYERS)]
    # The drawn seeds, and the states that the masks give.
    residuals, history = m.connection.residuals, DepthHistory()
    v = torch.randn(residuals.rows, 8, DIM, dtype=torch.float64)
    torch.manual_seed(7)
    got = [residuals(x, history, dropout_p=p if k else 0.0) for k, x in enumerate(v)]
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (residuals.rows,))
    dropped = [dropout(x, p if k else 0.0, seeds[k]) for k, x in enumerate(v)]
    for row, x in enumerate(got):
        torch.testing.assert_close(x, attention_row(residuals, dropped, row))


def test_blocks_are_an_eighth_of_the_layers():
    m = TransformerEncoder(9, DIM, HEADS, FFN, connection="block_attnres")
    assert m.connection.residuals.block == 2


@pytest.mark.parametrize(("kind", "rows"), [(TransformerEncoder, 2), (TransformerDecoder, 3)])
def test_each_sublayer_reads_by_default(kind, rows):
    m = kind(4, DIM, HEADS, FFN, connection="attnres")
    assert m.connection.residuals.rows == len(m.connection.norms) == 4 * rows + 1
    once = kind(4, DIM, HEADS, FFN, connection="attnres", reads=1)
    with pytest.raises(RuntimeError, match=r"size mismatch for connection\.residuals\.query"):
        m.load_state_dict(once.state_dict())
