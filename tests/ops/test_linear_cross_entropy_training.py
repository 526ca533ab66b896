"""deepfast.ops.linear_cross_entropy in a training loop: backward, autocast, memory."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import linear_cross_entropy
from deepfast.ops.linear_cross_entropy import chunk_rows
from deepfast.reference.linear_cross_entropy import linear_cross_entropy as reference
from tests.ops.losses import operands


@pytest.fixture
def backend(exact_backend):
    """It has no CUDA kernels; Triton's are tested in tests/kernels."""
    return exact_backend


def test_gradients_for_several_factors_at_once(backend):
    hidden, weight, target = operands(9, 8, 33)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss():
        return linear_cross_entropy(*leaves, target, backend=backend)

    factors = torch.tensor([1.0, 2.0])
    several = torch.autograd.grad(loss(), leaves, factors, is_grads_batched=True)
    for i, factor in enumerate(factors):
        one = torch.autograd.grad(loss(), leaves, factor)
        assert all(torch.equal(a[i], b) for a, b in zip(several, one, strict=True))


def test_tied_weight(backend):
    """The embedding is also the projection: its gradient is the sum of both uses."""
    weight, tokens = torch.randn(13, 6, requires_grad=True), torch.randint(13, (5,))

    def grad(project):
        hidden = torch.tanh(F.embedding(tokens, weight))
        return torch.autograd.grad(project(hidden), weight)[0]

    got = grad(lambda h: linear_cross_entropy(h, weight, tokens.flip(0), backend=backend))
    want = grad(lambda h: F.cross_entropy(F.linear(h, weight), tokens.flip(0)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "trainable", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "weight", "bias")]
)
def test_only_what_is_wanted_is_computed(backend, trainable):
    hidden, weight, target = operands(300, 8, 33)
    leaves = {"hidden": hidden, "weight": weight, "bias": torch.randn(33)}
    for name in trainable:
        leaves[name].requires_grad_()

    def products(run):
        with torch.autograd.profiler.profile() as profile:
            out = run()
        names = [event.name for event in profile.function_events]
        return out, sum(names.count(f"aten::{name}") for name in ("mm", "addmm", "addmm_"))

    def run():
        return linear_cross_entropy(**leaves, target=target, chunk=300, backend=backend)

    loss, count = products(run)
    assert count == 1 + len({"hidden", "weight"}.intersection(trainable))
    assert loss.requires_grad == bool(trainable)
    with torch.no_grad():
        without, count = products(run)
    assert count == 1
    assert torch.equal(without, loss)
    if trainable:
        loss.backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in trainable)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(tolerances, backend, dtype):
    """The same as with cast operands; the gradient of an fp32 weight is never rounded."""
    hidden, weight, target = operands(37, 24, 300)
    given = hidden, weight, torch.randn(300)
    h, w, b = leaves = [t.detach().requires_grad_() for t in given]
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(h, w, target, bias=b, label_smoothing=0.1, backend=backend)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, leaves)
    assert {g.dtype for g in grads} == {torch.float32}

    def plain(kind):
        h, w, b = cast = [t.to(dtype).to(kind).requires_grad_() for t in given]
        out = reference(h, w, target, bias=b, label_smoothing=0.1)[0]
        return torch.autograd.grad(out, cast)

    for got, near, exact in zip(grads, plain(dtype), plain(torch.float64), strict=True):
        tolerances.assert_accurate(got, near, exact, dtype)
    for grad in grads[1:]:
        assert not torch.equal(grad, grad.to(dtype).float())


def test_small_gradients_survive_float16(backend):
    """The factor of the mean, and a loss scale, are applied in fp32 to unscaled gradients."""
    T = 4096
    hidden, weight, target = operands(T, 8, 40, torch.float16, ignored=0)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, backend=backend)
    (scaled,) = torch.autograd.grad(loss * 2.0**14, hidden)
    exact = hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(exact, weight.double()), target)
    (grad,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(scaled.double() / 2**14, grad, rtol=0, atol=1e-3 * grad.max().item())


def test_default_chunk():
    assert [chunk_rows(t) for t in (0, 1, 8192, 8193, 100_000)] == [256, 256, 256, 257, 3125]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_peak_memory(meter, monkeypatch, weights, cast):
    """Beyond operands, their gradients and an accumulator in fp32: under 5% of the fp32 logits.

    An eighth of T = 8192, V = 32000, D = 512 each, in as many chunks. The allocator is asked: the
    inside of an op is hidden from `deepfast.memory.LiveBytes`.
    """
    T, D, V = 1024, 64, 4000
    monkeypatch.setattr(
        importlib.import_module("deepfast.ops.linear_cross_entropy"), "WIDENED", 250
    )
    hidden, weight, target = operands(T, D, V, weights)
    hidden.requires_grad_(), weight.requires_grad_()
    with meter() as forward, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk=T // 32)
    # Only the two gradients are kept for backward.
    kept = hidden.numel() * (2 if cast else weights.itemsize) + 4 * weight.numel()
    assert kept <= forward.left < kept + 2000
    # On some processors torch's products copy blocks of their operands, at any T, D and V about as
    # many bytes.
    h = hidden.detach().to(torch.bfloat16 if cast else weights)
    logits, dhidden = h.new_empty(T // 32, V), torch.empty_like(h[: T // 32])
    w = weight.detach().to(h.dtype)
    with meter() as product:
        torch.mm(logits, w, out=dhidden)
    peak = forward.peak - product.peak
    assert peak - hidden.nbytes - 4 * weight.numel() < 0.05 * 4 * T * V
    with meter() as backward:
        loss.backward()
    # In fp32 the kept tensor becomes the gradient; a CPU widens a product of 16 bits.
    wide = cast or weights == torch.bfloat16
    rounded = 0 if weights == torch.float32 else weight.nbytes
    assert backward.peak < 2000 + rounded + (8 * hidden.numel() if wide else 0)


def test_peak_memory_without_gradients(meter):
    T, D, V = 1024, 64, 4000
    hidden, weight, target = operands(T, D, V)
    with meter() as forward:
        linear_cross_entropy(hidden, weight, target, chunk=T // 32)
    assert forward.peak < 0.035 * 4 * T * V
