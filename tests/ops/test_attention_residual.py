"""deepfast.ops.attention_residual against the formula written out."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import attention_residual, rms_norm


def naive(query, residuals, rms_weight=None, output_rms_weight=None, rms_eps=1e-6, scale=None):
    """k = RMSNorm(v), p = softmax(scale <k, query>), o = sum p v, and its RMSNorm."""
    v = residuals if isinstance(residuals, torch.Tensor) else torch.stack(residuals)
    dim = v.shape[-1:]
    k = F.rms_norm(v, dim, rms_weight, rms_eps)
    p = ((k * query).sum(-1) * (1 if scale is None else scale)).softmax(0)
    o = (p.unsqueeze(-1) * v).sum(0)
    if output_rms_weight is not None:
        o = F.rms_norm(o, dim, output_rms_weight, rms_eps)
    return o, p.movedim(0, -1)


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("count", "dim", "stacked"),
    [(1, 5, True), (2, 1, False), (7, 64, True), (33, 17, False), (97, 255, True)],
)
def test_is_the_formula(backend, count, dim, stacked, weights):
    residuals = leaf(count, 2, 3, dim) if stacked else [leaf(2, 3, dim) for _ in range(count)]
    query = leaf(dim)
    options = {"scale": 0.5, "rms_eps": 1e-5} if weights else {}
    if weights:
        options |= {"rms_weight": leaf(dim), "output_rms_weight": leaf(dim)}
    out, p = attention_residual(query, residuals, return_weights=True, backend=backend, **options)
    want, want_p = naive(query, residuals, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(p, want_p.detach())
    assert not p.requires_grad
    leaves = [query, *([residuals] if stacked else residuals)]
    leaves += [options[n] for n in ("rms_weight", "output_rms_weight") if n in options]
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves, grad))


def test_half_precision_and_autocast():
    residuals, query = [torch.randn(4, 32) for _ in range(5)], torch.randn(32)
    want, _ = naive(query, [v.bfloat16().float() for v in residuals])
    out, p = attention_residual(query, [v.bfloat16() for v in residuals], return_weights=True)
    assert (out.dtype, p.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
    weight = torch.randn(32)
    normed = attention_residual(query, [v.bfloat16() for v in residuals], output_rms_weight=weight)
    assert torch.equal(normed, rms_norm(out, weight, 1e-6))
    full = attention_residual(query, residuals, return_weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        again, weights = attention_residual(query, residuals, return_weights=True)
        mixed = [residuals[0], *(v.bfloat16() for v in residuals[1:])]
        assert attention_residual(query, mixed).dtype == torch.float32
    assert torch.equal(again, full[0])
    assert torch.equal(weights, full[1])


@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("output_norm", [False, True])
def test_is_the_naive_form_of_fla(count, output_norm):
    of_fla = pytest.importorskip("fla.ops.attnres.naive").naive_attnres
    residuals = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(count)]
    query, weight, last = (torch.randn(16, requires_grad=True) for _ in range(3))
    output = {"output_rms_weight": last} if output_norm else {}
    found = []
    for op in (attention_residual, of_fla):
        out, p = op(query, residuals, weight, scale=0.5, return_weights=True, **output)
        p = p if op is of_fla else p.movedim(-1, 0)
        leaves = [query, weight, *residuals, *output.values()]
        found.append([out, p.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
