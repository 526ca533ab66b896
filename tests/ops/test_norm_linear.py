"""deepfast.ops.norm_linear: what it keeps for backward, and what it leaves out."""

import torch
import torch.nn.functional as F

from deepfast.ops import norm_linear

N = 11


def test_no_normalised_copy_is_kept(backend):
    """It saves the sum, which it returns anyway, and two numbers per token."""
    x = torch.randn(64, 32, requires_grad=True)
    params = [torch.randn(32), torch.randn(32), torch.randn(N, 32, requires_grad=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, s = norm_linear(x, *params, residual=x, backend=backend)
    rows = [t for t in kept if t.shape == x.shape]
    assert len(rows) == 1
    assert rows[0].data_ptr() == s.data_ptr()
    assert sum(t.numel() for t in kept) == x.numel() + 2 * 64 + 32 + 32 + params[2].numel()
    assert out.grad_fn is not None


def test_only_what_is_wanted_is_computed(backend):
    x, weight = torch.randn(5, 8), torch.randn(N, 8, requires_grad=True)
    out = norm_linear(x, None, None, weight, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    n = F.layer_norm(x, (8,))
    torch.testing.assert_close(grad, n.sum(0).expand(N, 8))
    _, s = norm_linear(x.requires_grad_(), None, None, weight, residual=x.detach(), backend=backend)
    gx, gw = torch.autograd.grad(s.sum(), (x, weight), allow_unused=True)
    assert torch.equal(gx, torch.ones_like(x))
    assert gw is None or gw.eq(0).all()
