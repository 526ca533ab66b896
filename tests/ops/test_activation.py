"""deepfast.ops.activation: its accuracy, and values that are not finite."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.ops import activation
from deepfast.ops.activation import activation_grad, compute_grad
from deepfast.reference.activation import KINDS
from tests.ops.cases import LOW

NUMBERS = torch.linspace(-14, 14, 2**16 + 1)


def units(got, exact):
    """The largest error in units of the last place of fp32."""
    place = torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exact.abs().log2().floor() - 23)
    return ((got.double() - exact).abs() / place).max().item()


def test_gelu_on_a_cpu_is_exact_to_a_few_units():
    """The result is accurate where it is small too, unless it is subnormal; erf loses all digits
    there. Around the zero of the slope only its absolute error is small."""
    if (reason := backends.why_unable("activation", "cpu", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    h = NUMBERS[NUMBERS > -12.5].view(1, -1)
    x = h.double()
    exact = x * torch.special.erfc(-x * 0.5**0.5) / 2
    got = activation(h, "gelu", backend="cpu")
    for least, most in ((-12.5, 4.2), (-1, 3.2), (1, 1.5)):
        part = (h > least) & (h != 0)
        assert units(got[part], exact[part]) < most
    given = torch.ones_like(h), h, None, "gelu", 0.0, None, [True, False], "cpu"
    slope, _ = compute_grad(activation_grad.operands(*given))
    leaf = x.requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(leaf).sum(), leaf)
    assert (slope.double() - exact).abs().max() < 1.5e-7


def test_gelu_of_the_reference_keeps_its_digits_far_below_zero():
    """1 + erf(x) would be 0 there."""
    h = torch.tensor([[-6.0, -9.0, -20.0]], dtype=torch.float64)
    expected = torch.special.log_ndtr(h).exp() * h
    torch.testing.assert_close(
        activation(h, "gelu", backend="reference"), expected, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("dout", [1.0, torch.nan])
def test_what_is_not_finite(any_backend, kind, dtype, dout):
    """Like torch in float64; torch's own fp32 form of gelu loses some."""
    h = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1.0, -1.0] * 5]).to(dtype)
    h, exact = h.requires_grad_(), h.detach().double().requires_grad_()
    got, want = activation(h, kind, backend=any_backend), getattr(F, kind)(exact)
    (dh,) = torch.autograd.grad(got, h, torch.full_like(h, dout))
    (dx,) = torch.autograd.grad(want, exact, torch.full_like(exact, dout))
    for a, b in ((got, want), (dh, dx)):
        torch.testing.assert_close(a, b.to(dtype), equal_nan=True)
