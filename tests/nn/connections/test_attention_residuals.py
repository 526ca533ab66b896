"""Stacks with attention residuals, one and two reads a layer, against the written-out form."""

import pytest
import torch

from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS
from tests.nn.written_out import DIM, HEADS, shaken

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
def test_what_a_layer_or_sublayer_returns_is_dropped(connection, reads):
    """By the push, but not the embedding."""
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
