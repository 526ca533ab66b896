"""Bad input to `deepfast.parallel` is refused in one sentence."""

import pytest
import torch
from torch import nn

from deepfast.nn import DLCL, TransformerDecoder, TransformerEncoder
from deepfast.parallel import edge_payload, split, sum_connection_gradients
from tests.parallel.encoders import batch, encoder


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (5, "split: 4 layers make at most as many stages, got 5"),
        (0, "split: stages must be a whole number of at least 1, got 0"),
        (2.0, "split: stages must be a whole number of at least 1, got 2.0"),
        ([1, 2], r"must add up to 4, got \[1, 2\]"),
        ([4, 0], "layers of a stage must be a whole number of at least 1, got 0"),
    ],
)
def test_stages(stages, message):
    with pytest.raises(ValueError, match=message):
        split(encoder(4), stages)
    with pytest.raises(ValueError, match=message):
        edge_payload(DLCL(4, 8), stages)


@pytest.mark.parametrize("connection", ["residual", "latent", "mudd"])
def test_connections(connection):
    with pytest.raises(ValueError, match=f"must be one of dlcl, denseformer.* got '{connection}'"):
        split(TransformerEncoder(4, 16, 2, 16, connection=connection), 2)


def test_other_modules():
    with pytest.raises(TypeError, match="must be a TransformerEncoder, got TransformerDecoder"):
        split(TransformerDecoder(4, 16, 2, 16), 2)
    with pytest.raises(TypeError, match="expected a DLCL or AttentionResiduals, got Linear"):
        edge_payload(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match=r"must contain an EncoderStage, got \['Linear'\]"):
        sum_connection_gradients([nn.Linear(2, 2)])


def test_operands():
    first, second = split(encoder(4), 2)
    x, _, padding = batch()
    with pytest.raises(TypeError, match="stage 1 of 2: expected 2 tensors, got 1"):
        second(x)
    with pytest.raises(TypeError, match="stage 0 of 2: expected 1 tensors, got 2"):
        first(x, x)
    with pytest.raises(ValueError, match=r"stage 0 of 2: expected \(B, S, 12\), got \(5, 12\)"):
        first(x[0])
    with pytest.raises(ValueError, match="stage 0 of 2: key_padding_mask must be bool"):
        first(x, key_padding_mask=padding.float())


def test_compiled_as_a_whole():
    first, _ = split(encoder(4), 2)
    with pytest.raises(Exception, match="cannot be compiled as a whole; compile its layers"):
        torch.compile(first, backend="eager", fullgraph=True)(batch()[0])
