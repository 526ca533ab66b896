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
SEEDS = {"seed": SEED, "activation_seed": SEED + 1}


def fused_form(x, residual, *params, p=0.0, kind="relu", **options):
    options |= {"dropout_p": p, "activation": kind, "activation_dropout_p": p, "training": True}
    return feed_forward(x, *params, residual=residual, **SEEDS, **options)


def leaves_of(shape, dtype=torch.float32, width=WIDTH):
    dim = shape[-1]
    given = {
        "x": torch.randn(shape),
        "residual": torch.randn(shape),
        "norm_weight": torch.randn(dim),
        "norm_bias": torch.randn(dim),
        "up_weight": torch.randn(width, dim) / dim**0.5,
        "up_bias": torch.randn(width),
        "down_weight": torch.randn(N, width) / width**0.5,
        "down_bias": torch.randn(N),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


def results(leaves, seeds, **options):
    """Outputs and gradients by name."""
    out, s = fused_form(*leaves.values(), **options)
    grads = torch.autograd.grad([out, s], list(leaves.values()), seeds)
    return {"out": out.detach(), "s": s.detach()} | dict(zip(leaves, grads, strict=True))


def made(dtype):
    """Leaves, and gradients of the two results."""
    seeds = torch.randn(2, 3, N).to(dtype), torch.randn(2, 3, 33).to(dtype)
    return leaves_of((2, 3, 33), dtype), seeds


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("p", "kind"), [(0.0, "relu"), (P, "relu"), (0.0, "gelu"), (P, "gelu")])
def test_the_same_bits_whatever_is_kept(backend, dtype, p, kind):
    options, given = {"p": p, "kind": kind, "backend": backend}, made(dtype)
    with record() as seen:
        kept = results(*given, **options)
    assert set(seen) == {("layer_norm", backend), ("activation", backend)}
    lean = results(*given, recompute=True, **options)
    for name, value in kept.items():
        assert torch.equal(lean[name], value), name


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_product_may_apply_the_bias_and_relu(tolerances, monkeypatch, dtype):
    """As on a GPU, and with the same bits whatever is kept."""
    asked, product = [], torch._addmm_activation
    module, ones = importlib.import_module("deepfast.ops.feed_forward"), torch.ones(2, 2)
    given = SimpleNamespace(activation="relu", activation_p=0.0, up=ones, up_bias=ones[0])
    assert not module._in_product(given)
    monkeypatch.setattr(module, "_in_product", lambda a: True)
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a: asked.append(a) or product(*a))
    given = made(dtype)
    kept = results(*given)
    assert len(asked) == 1
    lean = results(*given, recompute=True)
    assert len(asked) == 3
    default = results(*given, backend="reference")
    for name, value in kept.items():
        assert torch.equal(lean[name], value), name
        tolerances.assert_accurate(value, default[name], default[name].double(), dtype, name)


def test_without_residual_norm_and_biases():
    """x itself is the sum."""
    x, _, _, _, up, _, down, _ = leaves_of((5, 8)).values()
    out, s = feed_forward(x, None, None, up, None, down, None)
    assert s is x
    torch.testing.assert_close(out, F.linear(F.relu(F.linear(F.layer_norm(x, (8,)), up)), down))


def test_return_norm_gives_the_norm_in_place_of_the_sum():
    x, residual, *params = leaves_of((4, 8)).values()
    out, n = fused_form(x, residual, *params, return_norm=True)
    torch.testing.assert_close(n, F.layer_norm(x + residual, (8,), *params[:2]))
    again, s = fused_form(x, residual, *params)
    assert torch.equal(out, again)
    torch.testing.assert_close(s, x + residual)


@pytest.mark.parametrize(("recompute", "kind"), [(False, "relu"), (False, "gelu"), (True, "relu")])
def test_what_it_keeps(recompute, kind):
    leaves, kept = leaves_of((64, 16)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_form(*leaves.values(), p=P, kind=kind, recompute=recompute)
    sizes = {t.untyped_storage()._cdata: t.numel() for t in kept}
    activations = [n for n in sizes.values() if n >= 64 * 16]
    assert sorted(activations) == sorted([64 * 16] + ([64 * WIDTH] if not recompute else []))


def test_autocast():
    leaves = leaves_of((6, 16))
    with torch.autocast("cpu", torch.bfloat16):
        out, s = fused_form(*leaves.values())
    assert out.dtype == s.dtype == torch.bfloat16
    kept = ("norm_weight", "norm_bias", "up_bias")
    low = {k: v.bfloat16() if k not in kept else v for k, v in leaves.items()}
    assert torch.equal(out, fused_form(*low.values())[0])


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
