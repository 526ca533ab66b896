"""The states between the layers of a stack, for connections that read all of them."""

import pytest
import torch

from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder

SIZES = (3, 12, 2, 20)
PACKING = Packing(2, 4)


@pytest.mark.parametrize("connection", ["dlcl", "residual"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_states_are_the_inputs_of_the_layers_and_the_last_output(connection, norm):
    torch.manual_seed(1)
    encoder = TransformerEncoder(*SIZES, connection=connection, norm=norm).eval()
    seen = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    states = []
    x = torch.randn(8, 12)
    y = encoder.forward_packed(x, PACKING, states=states)
    torch.testing.assert_close(y, encoder.forward_packed(x, PACKING), rtol=0, atol=0)
    assert len(states) == 4
    for state, given in zip(states[:-1], seen[:3], strict=True):
        torch.testing.assert_close(state, given, rtol=0, atol=0)
    final = encoder.connection.norms[-1](states[-1]) if norm == "pre" else states[-1]
    torch.testing.assert_close(y, final)


@pytest.mark.parametrize("connection", ["dlcl", "residual"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_flow_from_every_state(connection, norm):
    encoder = TransformerEncoder(*SIZES, connection=connection, norm=norm, dropout=0.0)
    x = torch.randn(8, 12, dtype=torch.float64, requires_grad=True)
    encoder.double()
    weights = torch.randn(4, 8, 12, dtype=torch.float64)

    def total(x):
        states = []
        encoder.forward_packed(x, PACKING, states=states)
        return sum((w * s).sum() for w, s in zip(weights, states, strict=True))

    (gradient,) = torch.autograd.grad(total(x), x)
    direction, step = torch.randn_like(x), 1e-6
    with torch.no_grad():
        slope = (total(x + step * direction) - total(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)


def test_one_encoder_output_for_each_layer():
    torch.manual_seed(2)
    decoder = TransformerDecoder(*SIZES).eval()
    x, encoded = torch.randn(8, 12), torch.randn(8, 12)
    same = decoder.forward_packed(x, PACKING, encoded, PACKING)
    one_each = decoder.forward_packed(x, PACKING, [encoded] * 3, PACKING)
    torch.testing.assert_close(same, one_each, rtol=0, atol=0)
    other = decoder.forward_packed(x, PACKING, [encoded, encoded, encoded + 1], PACKING)
    assert not torch.equal(same, other)
