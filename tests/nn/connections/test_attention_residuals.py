"""Stacks with attention residuals, one and two reads a layer, against the written-out form."""

import pytest
import torch

from deepfast.nn import DepthHistory, Packing, TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS
from deepfast.reference.dropout import dropout
from tests.nn.written_out import DIM, HEADS, naive, shaken
from tests.specifications.connections import attention_row

LAYERS, FFN = 5, 16
PACKING = Packing(2, 4)
BOTH = pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
READS = pytest.mark.parametrize("reads", [1, 2])


def stack(kind, connection, **options):
    torch.manual_seed(3)
    block = 2 if connection == "block_attnres" else None
    options |= {"connection": connection, "block": block, "dropout": 0.0}
    m = kind(LAYERS, DIM, HEADS, FFN, **options)
    return shaken(m).double()


@BOTH
@READS
def test_states_are_the_inputs_of_the_layers(connection, reads):
    m, states = stack(TransformerEncoder, connection, reads=reads), []
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    m.forward_packed(PACKING.pack(x), PACKING, states=states)
    inputs = []
    naive(m, x, inputs=inputs)
    for got, expected in zip(states, inputs[::reads], strict=True):
        torch.testing.assert_close(PACKING.unpack(got), expected)


@BOTH
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
