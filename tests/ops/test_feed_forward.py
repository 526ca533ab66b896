"""deepfast.ops.feed_forward: its bits do not depend on what it keeps for backward; and what it and
add_norm_linear keep."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import record
from deepfast.ops import add_norm_linear, feed_forward

LOW = [torch.float32, torch.bfloat16, torch.float16]
SEED, P, WIDTH, N = 99, 0.3, 21, 11
NAMES = ("norm_weight", "norm_bias", "up_weight", "up_bias", "down_weight", "down_bias")


def fused_form(x, residual, *params, p, kind, recompute=False, **options):
    return feed_forward(
        x, *params, residual=residual, dropout_p=p, activation=kind, activation_dropout_p=p,
        training=True, recompute=recompute, seed=SEED, activation_seed=SEED + 1, **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("p", "kind"), [(0.0, "relu"), (P, "relu"), (0.0, "gelu"), (P, "gelu")])
def test_the_same_bits_whatever_is_kept(backend, dtype, p, kind):
    leaves = {k: v.to(dtype) for k, v in leaves_of((2, 3, 33)).items()}
    seeds = [torch.randn(2, 3, N).to(dtype), torch.randn(2, 3, 33).to(dtype)]
    options = {"p": p, "kind": kind, "backend": backend}
    with record() as seen:
        got = results(fused_form, leaves, dtype, seeds, **options)
    assert set(seen) == {("layer_norm", backend), ("activation", backend)}
    lean = results(fused_form, leaves, dtype, seeds, recompute=True, **options)
    for name, value in got.items():
        assert torch.equal(lean[name], value), name


def leaves_of(shape, width=WIDTH):
    dim = shape[-1]
    return {
        "x": torch.randn(shape),
        "residual": torch.randn(shape),
        "norm_weight": torch.randn(dim),
        "norm_bias": torch.randn(dim),
        "up_weight": torch.randn(width, dim) / dim**0.5,
        "up_bias": torch.randn(width),
        "down_weight": torch.randn(N, width) / width**0.5,
        "down_bias": torch.randn(N),
    }


def results(form, leaves, dtype, seeds, **options):
    """Outputs and gradients by name, leaves in ``dtype``."""
    leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in leaves.items()}
    out, s = form(*leaves.values(), **options)
    torch.autograd.backward([out, s], [seed.to(dtype) for seed in seeds])
    return {"out": out.detach(), "s": s.detach()} | {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_product_may_apply_the_bias_and_relu(tolerances, monkeypatch, dtype):
    """As on a GPU, and with the same bits whatever is kept."""
    asked, product = [], torch._addmm_activation
    module = importlib.import_module("deepfast.ops.feed_forward")
    assert not module._in_product(SimpleNamespace(
        activation="relu", activation_p=0.0, up=torch.ones(2, 2), up_bias=torch.ones(2)
    ))  # fmt: skip
    monkeypatch.setattr(module, "_in_product", lambda a: True)
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a: asked.append(a) or product(*a))
    leaves = {k: v.to(dtype) for k, v in leaves_of((2, 3, 33)).items()}
    seeds = [torch.randn(2, 3, N).to(dtype), torch.randn(2, 3, 33).to(dtype)]
    got = results(fused_form, leaves, dtype, seeds, p=0.0, kind="relu")
    assert len(asked) == 1
    lean = results(fused_form, leaves, dtype, seeds, p=0.0, kind="relu", recompute=True)
    assert len(asked) == 3
    for name, value in got.items():
        assert torch.equal(lean[name], value), name
    default = results(fused_form, leaves, dtype, seeds, p=0.0, kind="relu", backend="reference")
    for name, value in got.items():
        tolerances.assert_accurate(value, default[name], default[name].double(), dtype, name)


def test_without_residual_and_biases():
    """Plain layer-norm, no dropout: x itself is the sum."""
    leaves = leaves_of((5, 8))
    x = leaves["x"].requires_grad_()
    out, s = feed_forward(x, None, None, leaves["up_weight"], None, leaves["down_weight"], None)
    assert s is x
    expected = F.linear(
        F.relu(F.linear(F.layer_norm(x, (8,)), leaves["up_weight"])), leaves["down_weight"]
    )
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), x)[0])


def test_return_norm_gives_the_norm_in_place_of_the_sum():
    leaves = leaves_of((4, 8))
    x, residual, *params = leaves.values()
    out, n = fused_form(x, residual, *params, p=0.0, kind="relu", return_norm=True)
    expected = F.layer_norm(x + residual, (8,), *params[:2])
    torch.testing.assert_close(n, expected)
    again, s = fused_form(x, residual, *params, p=0.0, kind="relu")
    assert torch.equal(out, again)
    torch.testing.assert_close(s, x + residual)


@pytest.mark.parametrize(("recompute", "kind"), [(False, "relu"), (False, "gelu"), (True, "relu")])
def test_what_it_keeps(recompute, kind):
    leaves = {k: v.requires_grad_() for k, v in leaves_of((64, 16)).items()}
    seen = {}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fused_form(*leaves.values(), p=P, kind=kind, recompute=recompute)
    activations = [n for n in seen.values() if n >= 64 * 16]
    assert sorted(activations) == sorted([64 * 16] + ([64 * WIDTH] if not recompute else []))


def test_autocast():
    leaves = leaves_of((6, 16))
    with torch.autocast("cpu", torch.bfloat16):
        out, s = fused_form(*leaves.values(), p=0.0, kind="relu")
    assert out.dtype == s.dtype == torch.bfloat16
    kept = ("norm_weight", "norm_bias", "up_bias")
    low = {k: v.bfloat16() if k not in kept else v for k, v in leaves.items()}
    assert torch.equal(out, fused_form(*low.values(), p=0.0, kind="relu")[0])


def test_norm_linear_keeps_no_normalised_copy(backend):
    """It saves the sum, which it returns anyway, and two numbers per token."""
    x = torch.randn(64, 32, requires_grad=True)
    params = [torch.randn(32), torch.randn(32), torch.randn(11, 32, requires_grad=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, s = add_norm_linear(x, x, *params, backend=backend)
    rows = [t for t in kept if t.shape == x.shape]
    assert len(rows) == 1
    assert rows[0].data_ptr() == s.data_ptr()
    assert sum(t.numel() for t in kept) == x.numel() + 2 * 64 + 32 + 32 + params[2].numel()
    assert out.grad_fn is not None
