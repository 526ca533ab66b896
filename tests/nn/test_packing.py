"""Padding is removed and restored."""

import pytest
import torch

from deepfast.nn import Packing, TransformerEncoder

PADDING = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()


def test_real_tokens_in_order():
    x = torch.randn(4, 4, 3)
    packing = Packing.of(4, 4, PADDING)
    assert torch.equal(packing.pack(x), x[~PADDING])
    assert torch.equal(packing.unpack(packing.pack(x)), x * ~PADDING.unsqueeze(-1))


@pytest.mark.parametrize("padding", [None, torch.zeros(4, 4).bool()])
def test_without_padding_nothing_is_copied(padding):
    x = torch.randn(4, 4, 3)
    packing = Packing.of(4, 4, padding)
    assert packing.indices is None
    assert packing.padding is None
    assert packing.pack(x).data_ptr() == x.data_ptr()
    assert torch.equal(packing.unpack(packing.pack(x)), x)


def test_gradcheck():
    packing = Packing.of(4, 4, PADDING)
    x = torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True)
    t = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packing.pack, x)
    assert torch.autograd.gradcheck(packing.unpack, t)
    assert torch.autograd.gradgradcheck(packing.pack, x)
    assert torch.autograd.gradgradcheck(packing.unpack, t)


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_packing_that_inference_has_used_trains(padding):
    module, x = TransformerEncoder(1, 4, 2, 8), torch.randn(4, 4, 4)
    packing = Packing.of(4, 4, padding)
    with torch.inference_mode():
        module.forward_packed(packing.pack(x), packing)
        sentences = packing.sentences(x.device)
    module.forward_packed(packing.pack(x), packing).sum().backward()
    assert not sentences.is_inference()
