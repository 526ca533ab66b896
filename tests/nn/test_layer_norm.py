"""deepfast.nn.LayerNorm and RMSNorm."""

import pytest
import torch

from deepfast.nn import LayerNorm, RMSNorm

KINDS = pytest.mark.parametrize(
    ("kind", "theirs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)]
)


@pytest.mark.only_if(lambda kind, options: kind is LayerNorm or "bias" not in options)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@KINDS
def test_equals_pytorchs_module(backend, ran, kind, theirs, options):
    ours, theirs = kind(9, 1e-3, backend=backend, **options), theirs(9, 1e-3, **options)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
    theirs.load_state_dict(ours.state_dict())
    x, r = torch.randn(2, 2, 4, 9, requires_grad=True).unbind()
    with ran("layer_norm", backend):
        y, s = ours(x, residual=r)
    torch.testing.assert_close(s, x + r)
    for out, want in ((ours(r), theirs(r)), (y, theirs(s))):
        torch.testing.assert_close(out, want)
    grads = (
        torch.autograd.grad(norm(r).square().sum(), [r, *norm.parameters()])
        for norm in (ours, theirs)
    )
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_under_autocast(backend, kind, theirs, dtype):
    """It returns the dtype of its residual; without autocast the two must be equal."""
    norm, x, r = kind(9, backend=backend), torch.randn(4, 9).bfloat16(), torch.randn(4, 9).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got, (y, s) = norm(r), norm(x, residual=r)
        assert torch.equal(y, norm(s))
    assert got.dtype == y.dtype == dtype
    assert torch.equal(got, norm(r))
    assert torch.equal(s, x + r)
    if dtype == torch.float32:
        with pytest.raises(ValueError, match="residual"):
            norm(x, residual=r)
