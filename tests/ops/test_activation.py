"""deepfast.ops.activation: its accuracy, values that are not finite, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.ops import activation
from deepfast.ops.activation import activation_grad, activation_op, compute, compute_grad
from deepfast.reference.activation import KINDS

LOW = [torch.float32, torch.bfloat16, torch.float16]
SEED, P = 1234567890123, 0.3
NUMBERS = torch.linspace(-14, 14, 2**16 + 1)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def fused(h, kind, p, backend, bias=None):
    return activation(h, kind, bias=bias, dropout_p=p, training=True, seed=SEED, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_bias_keeps_its_dtype(backend, kind, dtype):
    """It is added unrounded, and its gradient is summed in the compute dtype."""
    h, bias = torch.randn(5, 9).bfloat16(), torch.randn(9).to(dtype).requires_grad_()
    fused(h, kind, 0.0, backend, bias).sum().backward()
    assert bias.grad.dtype == dtype
    # No gradient of h is wanted, and none of the bias.
    assert not fused(h, kind, 0.0, backend, bias.detach()).requires_grad


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
    torch.testing.assert_close(fused(h, "gelu", 0.0, "reference"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("dout", [1.0, torch.nan])
def test_what_is_not_finite(any_backend, kind, dtype, dout):
    """Like torch in float64; torch's own fp32 form of gelu loses some."""
    h = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1.0, -1.0] * 5]).to(dtype)
    h, exact = h.requires_grad_(), h.detach().double().requires_grad_()
    got, want = fused(h, kind, 0.0, any_backend), getattr(F, kind)(exact)
    (dh,) = torch.autograd.grad(got, h, torch.full_like(h, dout))
    (dx,) = torch.autograd.grad(want, exact, torch.full_like(exact, dout))
    for a, b in ((got, want), (dh, dx)):
        torch.testing.assert_close(a, b.to(dtype), equal_nan=True)


def test_in_place_takes_no_memory(meter, kind):
    h = torch.randn(200, 300)
    with meter() as m:
        compute(activation_op.operands(h, None, kind, P, torch.tensor(1), "cpu"), inplace=True)
    assert m.peak < h.nbytes / 10


def test_relu_keeps_its_result_alone_and_gelu_its_input(backend, kind):
    h = torch.randn(6, 9, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = fused(h, kind, P, backend)
    seeds = [t for t in kept if t.dim() == 0]
    (tensor,) = (t for t in kept if t.dim() == 2)
    assert tensor.data_ptr() == (out if kind == "relu" else h).data_ptr()
    assert len(seeds) == (kind == "gelu")


def test_saved_tensor_changed_in_place_is_an_error(backend, kind):
    a = torch.randn(4, 6, requires_grad=True) * 1
    out = fused(a, kind, P, backend)
    (out if kind == "relu" else a).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
