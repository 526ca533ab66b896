"""deepfast.ops.feed_forward against float64, and what it keeps for backward."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import BackendError, record
from deepfast.ops import feed_forward
from deepfast.reference.dropout import dropout_mask

LOW = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (2, 3, 33), (40, 64)]
SEED, P, WIDTH, N = 99, 0.3, 21, 11
NAMES = ("norm_weight", "norm_bias", "up", "up_bias", "down", "down_bias")


def dropped(x, seed, p):
    if not p:
        return x
    return x * dropout_mask(seed, x.numel() // x.shape[-1], x.shape[-1], p).view(x.shape).to(x)


def plain_form(x, residual, norm_weight, norm_bias, up, up_bias, down, down_bias, *, p, kind):
    """The same in PyTorch's own ops."""
    s = dropped(x, SEED, p) + residual
    h = F.linear(F.layer_norm(s, s.shape[-1:], norm_weight, norm_bias), up, up_bias)
    a = dropped(getattr(F, kind)(h), SEED + 1, p)
    return F.linear(a, down, down_bias), s


def fused_form(x, residual, *params, p, kind, keep=True, **options):
    return feed_forward(
        x, *params, residual=residual, dropout_p=p, activation=kind, activation_dropout_p=p,
        training=True, keep=keep, seed=SEED, activation_seed=SEED + 1, **options,
    )  # fmt: skip


def leaves_of(shape, width=WIDTH):
    dim = shape[-1]
    return {
        "x": torch.randn(shape),
        "residual": torch.randn(shape),
        "norm_weight": torch.randn(dim),
        "norm_bias": torch.randn(dim),
        "up": torch.randn(width, dim) / dim**0.5,
        "up_bias": torch.randn(width),
        "down": torch.randn(N, width) / width**0.5,
        "down_bias": torch.randn(N),
    }


def results(form, leaves, dtype, seeds, **options):
    """Outputs and gradients by name, leaves in ``dtype``."""
    leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in leaves.items()}
    out, s = form(*leaves.values(), **options)
    torch.autograd.backward([out, s], [seed.to(dtype) for seed in seeds])
    return {"out": out.detach(), "s": s.detach()} | {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("p", "kind"), [(0.0, "relu"), (P, "relu"), (0.0, "gelu"), (P, "gelu")])
def test_agrees(tolerances, backend, dtype, shape, p, kind):
    leaves = {k: v.to(dtype) for k, v in leaves_of(shape).items()}
    seeds = [torch.randn(*shape[:-1], N).to(dtype), torch.randn(shape).to(dtype)]
    with record() as seen:
        got = results(fused_form, leaves, dtype, seeds, p=p, kind=kind, backend=backend)
    # Triton serves the activation where CUDA is asked for.
    activation = "triton" if backend == "cuda" else backend
    assert set(seen) == {("layer_norm", backend), ("activation", activation)}
    lean = results(fused_form, leaves, dtype, seeds, p=p, kind=kind, keep=False, backend=backend)
    for name, value in got.items():
        assert torch.equal(lean[name], value), name
    plain, exact = (
        results(plain_form, leaves, d, seeds, p=p, kind=kind) for d in (dtype, torch.float64)
    )
    tolerances.assert_all_accurate(got, plain, exact, dtype)


@pytest.mark.parametrize("kind", ["relu", "gelu"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("want_norm", [True, False])
def test_gradcheck(exact_backend, kind, keep, want_norm):
    leaves = [v.double().requires_grad_() for v in leaves_of((2, 4), width=5).values()]

    def run(*leaves):
        return fused_form(
            *leaves, p=P, kind=kind, keep=keep, want_norm=want_norm, backend=exact_backend
        )

    assert torch.autograd.gradcheck(run, leaves)


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
    lean = results(fused_form, leaves, dtype, seeds, p=0.0, kind="relu", keep=False)
    assert len(asked) == 3
    for name, value in got.items():
        assert torch.equal(lean[name], value), name
    plain, exact = (
        results(plain_form, leaves, d, seeds, p=0.0, kind="relu") for d in (dtype, torch.float64)
    )
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def test_without_residual_and_biases():
    """Plain layer-norm, no dropout: x itself is the sum."""
    leaves = leaves_of((5, 8))
    x = leaves["x"].requires_grad_()
    out, s = feed_forward(x, None, None, leaves["up"], None, leaves["down"], None)
    assert s is x
    expected = F.linear(F.relu(F.linear(F.layer_norm(x, (8,)), leaves["up"])), leaves["down"])
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), x)[0])


def test_want_norm_gives_the_norm_in_place_of_the_sum():
    leaves = leaves_of((4, 8))
    x, residual, *params = leaves.values()
    out, n = fused_form(x, residual, *params, p=0.0, kind="relu", want_norm=True)
    expected = F.layer_norm(x + residual, (8,), *params[:2])
    torch.testing.assert_close(n, expected)
    torch.testing.assert_close(out, plain_form(x, residual, *params, p=0.0, kind="relu")[0])


@pytest.mark.parametrize("frozen", NAMES)
def test_a_frozen_parameter_gets_no_gradient(frozen):
    leaves = {k: v.requires_grad_(k != frozen) for k, v in leaves_of((3, 6)).items()}
    out, s = fused_form(*leaves.values(), p=P, kind="gelu", keep=False)
    (out.sum() + s.sum()).backward()
    assert [k for k, v in leaves.items() if v.grad is None] == [frozen]


def test_only_the_second_result_is_used():
    leaves = {k: v.requires_grad_() for k, v in leaves_of((3, 6)).items()}
    _, s = fused_form(*leaves.values(), p=0.0, kind="relu")
    s.sum().backward()
    assert torch.equal(leaves["x"].grad, torch.ones(3, 6))
    assert leaves["up"].grad is None or not leaves["up"].grad.any()


@pytest.mark.parametrize(("keep", "kind"), [(True, "relu"), (True, "gelu"), (False, "relu")])
def test_what_it_keeps(keep, kind):
    leaves = {k: v.requires_grad_() for k, v in leaves_of((64, 16)).items()}
    seen = {}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fused_form(*leaves.values(), p=P, kind=kind, keep=keep)
    activations = [n for n in seen.values() if n >= 64 * 16]
    assert sorted(activations) == sorted([64 * 16] + ([64 * WIDTH] if keep else []))


def test_autocast():
    leaves = leaves_of((6, 16))
    with torch.autocast("cpu", torch.bfloat16):
        out, s = fused_form(*leaves.values(), p=0.0, kind="relu")
    assert out.dtype == s.dtype == torch.bfloat16
    kept = ("norm_weight", "norm_bias", "up_bias")
    low = {k: v.bfloat16() if k not in kept else v for k, v in leaves.items()}
    assert torch.equal(out, fused_form(*low.values(), p=0.0, kind="relu")[0])


def test_bad_operands_are_one_sentence():
    leaves = leaves_of((3, 6))

    def run(**changes):
        return fused_form(*(leaves | changes).values(), p=0.0, kind="relu")

    with pytest.raises(ValueError, match=r"feed_forward: up must be \(F, 6\), got \(21, 5\)"):
        run(up=torch.randn(21, 5))
    with pytest.raises(ValueError, match=r"feed_forward: down must be \(N, 21\), got \(11, 20\)"):
        run(down=torch.randn(11, 20))
    with pytest.raises(ValueError, match=r"feed_forward: up_bias must be \(21,\), got \(20,\)"):
        run(up_bias=torch.randn(20))
    with pytest.raises(ValueError, match=r"feed_forward: down must be torch.float32 on cpu"):
        run(down=torch.randn(11, 21).double())
    with pytest.raises(TypeError, match="feed_forward: x must be a tensor"):
        run(x=3)
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, got 'silu'"):
        fused_form(*leaves.values(), p=0.0, kind="silu")
    with pytest.raises(ValueError, match="dropout_p must be between 0 and 1, got 2"):
        fused_form(*leaves.values(), p=2, kind="relu")
    operands = [leaves[name] for name in NAMES]
    for options, error, message in (
        ({"eps": math.nan}, ValueError, "eps must be a number of at least 0, got nan"),
        (
            {"activation_dropout_p": 0.5, "training": True, "activation_seed": 1.5},
            TypeError,
            "activation_seed must be an int or a 0-dim int64 tensor on cpu, got 1.5",
        ),
    ):
        with pytest.raises(error, match=f"feed_forward: {message}"):
            feed_forward(leaves["x"], *operands, **options)
    with pytest.raises(BackendError):
        fused_form(*leaves.values(), p=0.0, kind="relu", backend="varlen")
