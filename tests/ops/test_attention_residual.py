"""deepfast.ops.attention_residual: a published form in plain torch, and 16 bits."""

import pytest
import torch

from deepfast.ops import attention_residual, rms_norm


@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize(
    ("count", "stacked", "output_norm"), [(1, True, True), (6, True, False), (6, False, True)]
)
def test_is_the_naive_form_of_fla(backend, count, stacked, output_norm):
    of_fla = pytest.importorskip("fla.ops.attnres.naive").naive_attnres
    residuals = torch.randn(count, 2, 5, 16)
    residuals = [x.requires_grad_() for x in ([residuals] if stacked else residuals.unbind())]
    query, weight, last = (torch.randn(16, requires_grad=True) for _ in range(3))
    given = query, residuals[0] if stacked else residuals, weight
    options = {"scale": 0.5, "rms_eps": 1e-2, "return_weights": True}
    options |= {"output_rms_weight": last} if output_norm else {}
    (out, p), (want, of_source) = (
        attention_residual(*given, **options, backend=backend),
        of_fla(*given, **options),
    )
    assert not p.requires_grad
    torch.testing.assert_close((out, p), (want, of_source.detach().movedim(0, -1)))
    leaves = [query, weight, *residuals, *([last] if output_norm else [])]
    got, wanted = (torch.autograd.grad(o.sin().sum(), leaves) for o in (out, want))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_half_precision_and_autocast():
    """Weights are fp32. Autocast casts nothing down, and widens sources of several dtypes."""
    sources, query, weight = torch.randn(5, 4, 32).unbind(), torch.randn(32), torch.randn(32)
    low = [v.bfloat16() for v in sources]
    out, p = attention_residual(query, low, return_weights=True)
    assert (out.dtype, p.dtype) == (torch.bfloat16, torch.float32)
    normed = attention_residual(query, low, output_rms_weight=weight)
    assert torch.equal(normed, rms_norm(out, weight, 1e-6))
    full = attention_residual(query, sources, return_weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        again = attention_residual(query, sources, return_weights=True)
        assert attention_residual(query, [sources[0], *low[1:]]).dtype == torch.float32
    assert all(map(torch.equal, again, full))
