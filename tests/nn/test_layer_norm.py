"""deepfast.nn.LayerNorm and RMSNorm."""

import pytest
import torch

from deepfast.nn import LayerNorm, RMSNorm

KINDS = pytest.mark.parametrize(
    ("kind", "theirs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)]
)


@KINDS
def test_equals_pytorchs_module(backend, ran, kind, theirs):
    ours, theirs = kind(9, eps=1e-3, backend=backend), theirs(9, eps=1e-3)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9)
    with ran("layer_norm", backend):
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}], ids=str)
@KINDS
def test_without_parameters_as_pytorchs_module(backend, ran, kind, theirs, options):
    if kind is RMSNorm and "bias" in options:
        pytest.skip("it has no bias")
    ours, theirs = kind(9, 1e-3, backend=backend, **options), theirs(9, 1e-3, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 4, 9, requires_grad=True)
    with ran("layer_norm", backend):
        outputs = ours(x), theirs(x)
        torch.testing.assert_close(*outputs)
        grads = (
            torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])
            for y, norm in zip(outputs, (ours, theirs), strict=True)
        )
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@KINDS
def test_dropout_follows_the_mode(backend, kind, theirs):
    norm, x = kind(9, backend=backend), torch.randn(40, 9)
    assert not torch.equal(norm(x, dropout_p=0.5), norm(x))
    norm.eval()
    assert torch.equal(norm(x, dropout_p=0.5), norm(x))


@KINDS
def test_residual_returns_the_sum(backend, kind, theirs):
    norm, (x, r) = kind(9, backend=backend), torch.randn(2, 4, 9)
    y, s = norm(x, residual=r)
    torch.testing.assert_close(s, x + r)
    torch.testing.assert_close(y, theirs(9, eps=norm.eps)(x + r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_returns_the_dtype_of_its_input_under_autocast(backend, kind, theirs, dtype):
    norm, x = kind(9, backend=backend), torch.randn(4, 9).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = norm(x)
    assert got.dtype == dtype
    assert torch.equal(got, norm(x))


@KINDS
def test_a_branch_in_16_bits_on_a_residual_in_32_under_autocast(backend, kind, theirs):
    norm, (x, r) = kind(9, backend=backend), torch.randn(2, 4, 9)
    x = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, s = norm(x, residual=r)
        assert torch.equal(s, x + r)
        assert torch.equal(y, norm(s))
    with pytest.raises(ValueError, match="residual"):
        norm(x, residual=r)


def test_as_output():
    norm = LayerNorm(9, eps=1e-3)
    assert norm.as_output() == (norm.weight, norm.bias, 1e-3, False)
    norm = RMSNorm(9)
    assert norm.as_output() == (norm.weight, None, 1e-6, True)
