"""deepfast.ops.norm_linear against float64, and what it keeps for backward."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import BackendError
from deepfast.ops import norm_linear
from deepfast.reference.dropout import dropout_mask

LOW = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 17), (2, 3, 33), (40, 64), (7, 255)]
SEED, P, N = 99, 0.3, 11


def plain_form(x, residual, norm_weight, norm_bias, weight, bias, p):
    """The same in PyTorch's own ops."""
    s = x
    if p:
        s = s * dropout_mask(SEED, x.numel() // x.shape[-1], x.shape[-1], p).view(x.shape).to(x)
    s = s + residual
    return F.linear(F.layer_norm(s, s.shape[-1:], norm_weight, norm_bias), weight, bias), s


def results(form, leaves, dtype, seeds):
    """Outputs and gradients by name, leaves in ``dtype``."""
    leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in leaves.items()}
    out, s = form(*leaves.values())
    torch.autograd.backward([out, s], [seed.to(dtype) for seed in seeds])
    return {"out": out.detach(), "s": s.detach()} | {k: v.grad for k, v in leaves.items()}


def leaves_of(shape):
    dim = shape[-1]
    return {
        "x": torch.randn(shape),
        "residual": torch.randn(shape),
        "norm_weight": torch.randn(dim),
        "norm_bias": torch.randn(dim),
        "weight": torch.randn(N, dim) / dim**0.5,
        "bias": torch.randn(N),
    }


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, P])
def test_agrees(tolerances, ran, backend, dtype, shape, p):
    leaves = {k: v.to(dtype) for k, v in leaves_of(shape).items()}
    seeds = [torch.randn(*shape[:-1], N).to(dtype), torch.randn(shape).to(dtype)]

    def fused(x, residual, *params):
        return norm_linear(
            x, *params, residual=residual, dropout_p=p, training=True, seed=SEED, backend=backend
        )

    def plain(*args):
        return plain_form(*args, p)

    with ran("layer_norm", backend):
        got = results(fused, leaves, dtype, seeds)
    tolerances.assert_all_accurate(
        got, results(plain, leaves, dtype, seeds), results(plain, leaves, torch.float64, seeds),
        dtype,
    )  # fmt: skip


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("residual", [True, False])
def test_gradcheck(exact_backend, residual, p):
    leaves = {k: v.double().requires_grad_() for k, v in leaves_of((3, 6)).items()}
    rest = leaves.pop("residual")

    def run(x, r, *params):
        return norm_linear(
            x, *params, residual=r if residual else None, dropout_p=p, training=True, seed=SEED,
            backend=exact_backend,
        )  # fmt: skip

    x, *params = leaves.values()
    torch.autograd.gradcheck(run, (x, rest, *params))


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "norm_linear: x must be a tensor, got list"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"weight": torch.ones(N, 5)}, ValueError, r"weight must be \(N, 4\), got \(11, 5\)"),
        ({"weight": torch.ones(4)}, ValueError, r"weight must be \(N, 4\), got \(4,\)"),
        ({"weight": torch.ones(N, 4).half()}, ValueError, "weight must be torch.float32 on cpu"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must be \(11,\), got \(4,\)"),
        ({"norm_weight": torch.ones(5)}, ValueError, r"weight must be \(4,\), got \(5,\)"),
        ({"residual": torch.ones(2, 4)}, ValueError, r"shape \(3, 4\), got \(2, 4\)"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1, got -0.1"),
        ({"eps": float("nan")}, ValueError, "norm_linear: eps must be a number of .* 0, got nan"),
        ({"backend": "cuda"}, BackendError, "without CUDA|on cpu, not cuda"),
    ],
)
def test_refuses(change, error, message):
    args = {
        "x": torch.ones(3, 4), "norm_weight": None, "norm_bias": None, "weight": torch.ones(N, 4)
    } | change  # fmt: skip
    with pytest.raises(error, match=message):
        norm_linear(**args)
