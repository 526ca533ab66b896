"""The specification of the activation against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.reference.activation import KINDS, activation, activation_grad
from deepfast.reference.dropout import dropout_mask

SEED, P = 5, 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, P])
def test_equals_pytorch(kind, p):
    h = (3 * torch.randn(2, 4, 7, dtype=torch.float64)).requires_grad_()
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    out = activation(h, kind, bias=bias, dropout_p=p, seed=SEED)
    mask = dropout_mask(SEED, 8, 7, p).view(2, 4, 7)
    expected = getattr(F, kind)(h + bias) * mask
    torch.testing.assert_close(out, expected)
    dout = torch.randn(2, 4, 7, dtype=torch.float64)
    saved = (out if kind == "relu" else h).detach()
    got = activation_grad(dout, saved, kind, bias=bias.detach(), dropout_p=p, seed=SEED)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (h, bias), dout))


def test_relu_needs_no_seed_for_its_gradient():
    h, dout = torch.randn(2, 6, 9).unbind()
    out = activation(h, "relu", dropout_p=P, seed=SEED)
    assert torch.equal(
        activation_grad(dout, out, "relu", dropout_p=P)[0],
        torch.where(out != 0, dout * dropout_mask(SEED, 6, 9, P).max().float(), 0),
    )


def test_gelu_keeps_its_digits_far_below_zero():
    """1 + erf(x) would be 0 there."""
    h = torch.tensor([[-6.0, -9.0, -20.0]], dtype=torch.float64)
    expected = torch.special.log_ndtr(h).exp() * h
    torch.testing.assert_close(activation(h, "gelu"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_are_rounded_once(kind, dtype):
    h, dout = torch.randn(2, 5, 8).to(dtype).unbind()
    out = activation(h, kind, dropout_p=P, seed=SEED)
    wide = activation(h.float(), kind, dropout_p=P, seed=SEED)
    assert out.dtype == dtype
    assert torch.equal(out, wide.to(dtype))
    saved = out if kind == "relu" else h
    dh, exact = (
        activation_grad(g, s, kind, dropout_p=P, seed=SEED)[0]
        for g, s in ((dout, saved), (dout.float(), saved.float()))
    )
    assert dh.dtype == dtype
    assert torch.equal(dh, exact.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_everything(kind):
    h = torch.tensor([[torch.inf, torch.nan, 1.0, -1.0]])
    assert activation(h, kind, dropout_p=1.0, seed=SEED).eq(0).all()
    saved = torch.zeros_like(h) if kind == "relu" else h
    assert all(g.eq(0).all() for g in activation_grad(h, saved, kind, dropout_p=1.0, seed=SEED))
