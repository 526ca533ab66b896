"""ELC-BERT's base model: ``x_l = sum_k softmax(w_l)_k y_k``, and layers that drop their input."""

import pytest
import torch
import torch.nn.functional as F

import deepfast
from deepfast.nn import DLCL, TransformerDecoder, TransformerEncoder
from tests.attach.models import perturbed
from tests.nn.test_deepnorm import FFN, D, H, attend

ROW = torch.tensor([0.1748777, 0.1748777, 0.1748777, 0.4753669])
"""Of the fourth layer at the start, computed by the authors' code (ltgoslo/elc-bert, base)."""


def formula(stack, x, encoded=None):
    depth, norms, states = stack.connection.dlcl, stack.connection.norms, [x]

    def ln(norm, z):
        return F.layer_norm(z, (D,), norm.weight, norm.bias, norm.eps)

    for row, m in enumerate(stack.layers):
        p = depth.weight[row, : row + 1].softmax(0)
        x = sum(share * state for share, state in zip(p, states, strict=True))
        a = attend(m.attention, ln(norms[row], x), causal=encoded is not None)
        if encoded is not None:
            a = a + attend(m.cross_attention, ln(m.cross_attention_norm, a), encoded)
        hidden = F.relu(m.feed_forward.up(ln(m.feed_forward_norm, a)))
        states.append(a + m.feed_forward.down(hidden))
    return ln(norms[len(stack.layers)], states[-1])


@pytest.mark.parametrize("kind", [TransformerEncoder, TransformerDecoder])
@pytest.mark.parametrize("recompute", ["none", "ffn", "layer", "layer+input"])
def test_formula(kind, recompute):
    stack = kind(4, D, H, FFN, connection="elcbert", dropout=0.0, recompute=recompute)
    stack = perturbed(stack).double()
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    encoded = [torch.randn(2, 7, D).double()] * (kind is TransformerDecoder)
    found = []
    for out in (stack(x, *encoded), formula(stack, x, *encoded)):
        grads = torch.autograd.grad(out.square().sum(), [x, *stack.parameters()])
        found.append([out, *grads])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def test_start():
    dlcl = TransformerEncoder(5, D, H, FFN, connection="elcbert").connection.dlcl
    torch.testing.assert_close(dlcl.effective_weight()[3, :4], ROW, rtol=1e-6, atol=0)
    assert dlcl.effective_weight()[5].tolist() == [0, 0, 0, 0, 0, 1]


def test_a_layer_drops_its_input_in_training():
    layer = TransformerEncoder(1, D, H, FFN, connection="elcbert", dropout=0.5).layers[0]
    n, packing = torch.randn(12, D), deepfast.nn.Packing(2, 6)
    a, _ = layer(1e6 * torch.randn(12, D), normed=n, packing=packing)
    assert 0.2 < (a == 0).float().mean() < 0.8
    assert a.abs().max() < 1e3


def test_decoding_step_by_step():
    decoder = TransformerDecoder(3, D, H, FFN, connection="elcbert").eval()
    x, encoded = torch.randn(2, 4, D), torch.randn(2, 5, D)
    with torch.no_grad():
        wanted = decoder(x, encoded)
        packing = deepfast.nn.Packing(2, 5)
        cache = decoder.start(encoded.flatten(0, 1), packing)
        got = [decoder.step(x[:, i], cache) for i in range(4)]
    torch.testing.assert_close(torch.stack(got, 1), wanted, rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="do not add their input"):
        deepfast.connect(torch.nn.Sequential(torch.nn.Tanh()), norm="pre", connection="elcbert")
    with pytest.raises(ValueError, match="needs norm='pre'"):
        TransformerEncoder(2, D, H, FFN, connection="elcbert", norm="post")
    with pytest.raises(ValueError, match="init"):
        DLCL(2, D, init="newest")
