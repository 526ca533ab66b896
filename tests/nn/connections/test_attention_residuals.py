"""Stacks with attention residuals: what is dropped, and which parts of a layer read."""

import pytest
import torch

from deepfast.nn import TransformerDecoder, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS
from tests.nn.written_out import DIM, HEADS

FFN = 16


@pytest.mark.parametrize("connection", ATTENTION_RESIDUALS)
@pytest.mark.parametrize("reads", [1, 2])
def test_what_a_layer_or_sublayer_returns_is_dropped(connection, reads):
    """By the push, but not the embedding."""
    options = {"connection": connection, "reads": reads, "dropout": 0.5}
    m, dropped = TransformerEncoder(5, DIM, HEADS, FFN, **options), []
    m.connection.residuals.register_forward_pre_hook(
        lambda _, args, given: dropped.append(given["dropout_p"]), with_kwargs=True
    )
    m(torch.randn(2, 4, DIM))
    assert dropped == [0, *[0.5] * (reads * 5)]


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
