"""deepfast.nn.LayerNorm, RMSNorm and Packing."""

import pytest
import torch

from deepfast.nn import LayerNorm, Packing, RMSNorm, TransformerEncoder
from tests.nn.written_out import outcome, shaken

KINDS = [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)]


MODULES = [(*kind, options) for kind in KINDS for options in ({}, {"elementwise_affine": False})]
MODULES += [(*KINDS[0], {"bias": False})]


@pytest.mark.parametrize(("kind", "theirs", "options"), MODULES, ids=str)
def test_equals_pytorchs_module(backend, ran, kind, theirs, options):
    ours, theirs = kind(9, 1e-3, backend=backend, **options), theirs(9, 1e-3, **options)
    theirs.load_state_dict(shaken(ours).state_dict())
    x, r = torch.randn(2, 2, 4, 9, requires_grad=True).unbind()
    with ran("layer_norm", backend):
        y, s = ours(x, residual=r)
    torch.testing.assert_close((y, s), (theirs(s), x + r))
    torch.testing.assert_close(outcome(ours, r, ours), outcome(theirs, r, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_under_autocast(backend, kind, dtype):
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


PADDING = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_packing_that_inference_has_used_trains(padding):
    module, x = TransformerEncoder(1, 4, 2, 8), torch.randn(4, 4, 4)
    packing = Packing.of(4, 4, padding)
    with torch.inference_mode():
        module.forward_packed(packing.pack(x), packing)
        sentences = packing.sentences(x.device)
    module.forward_packed(packing.pack(x), packing).sum().backward()
    assert not sentences.is_inference()
