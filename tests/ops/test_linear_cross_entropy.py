"""deepfast.ops.linear_cross_entropy: against float64, in a training loop, its memory."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.cases import sentences
from deepfast.cases.case import Rows
from deepfast.ops import linear_cross_entropy
from deepfast.ops.linear_cross_entropy import chunk_rows
from deepfast.reference.linear_cross_entropy import linear_cross_entropy as reference
from tests.ops.cases import assert_agrees

LOW = [torch.float32, torch.bfloat16, torch.float16]
# T, D, V: sizes that fit no block or vector, and a vocabulary beyond 16 bits. Of one word the
# gradient is 0 but for the rounding of 1 - smoothing, which the plain form need not share.
SHAPES = [(1, 1, 2), (5, 3, 2), (37, 24, 1001), (9, 64, 512), (3, 8, 70_001)]


def operands(T, D, V, dtype=torch.float32, ignored=0.3):
    hidden = torch.randn(T, D).to(dtype)
    weight = (2 * torch.randn(V, D) / D**0.5).to(dtype)
    target = torch.randint(V, (T,)).where(torch.rand(T) >= ignored, -100)
    target[: T // 2 + 1].clamp_(min=0)
    return hidden, weight, target


@pytest.mark.parametrize("dtype", list(backends.DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_agrees(backend, dtype, shape, smoothing, biased, reduction, chunk):
    T, D, V = shape
    options = {"label_smoothing": smoothing, "reduction": reduction, "bias": biased}
    case = sentences.linear_cross_entropy("", Rows((T,), D), V, chunk=chunk, **options)
    assert_agrees(case, backend, dtype)


@pytest.mark.parametrize("dtype", list(backends.DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_weighted_agrees(backend, dtype, shape, reduction, chunk):
    T, D, V = shape
    options = {"reduction": reduction, "chunk": chunk, "bias": True, "weighted": True}
    assert_agrees(sentences.linear_cross_entropy("", Rows((T,), D), V, **options), backend, dtype)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(backend):
    hidden, target = torch.zeros(3, 4), torch.tensor([0, 1, 49])
    options = {"label_smoothing": 0.1, "reduction": "sum", "return_nll": True, "backend": backend}
    loss, nll = linear_cross_entropy(hidden, torch.randn(50, 4), target, **options)
    assert loss.item() == pytest.approx(3 * math.log(50))
    assert nll.item() == pytest.approx(3 * math.log(50))
    assert not nll.requires_grad


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_logits_far_apart(backend, dtype):
    """No overflow of the exponential nor, in fp16, of the logits; exact zeros far from the
    largest."""
    hidden = torch.tensor([[4.0], [-4.0]], dtype=dtype)
    weight = torch.tensor([[3e4], [0.0], [-3e4]], dtype=dtype, requires_grad=True)
    target = torch.tensor([0, 1])
    loss = linear_cross_entropy(hidden, weight, target, reduction="sum", backend=backend)
    assert loss.item() == 4 * weight[0].item()
    loss.backward()
    assert weight.grad.tolist() == [[0.0], [4.0], [-4.0]]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows(backend, value):
    hidden, weight, target = operands(3, 4, 40, ignored=0)
    hidden[1, 2] = value
    loss = linear_cross_entropy(hidden, weight, target, backend=backend)
    assert loss.isnan()


def test_no_target_counts(backend):
    """NaN for a mean, as in torch; no gradient."""
    hidden, weight, _ = operands(5, 4, 7)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    target = torch.full((5,), -100)
    for reduction, value in (("mean", math.nan), ("sum", 0.0)):
        loss = linear_cross_entropy(
            *leaves, target, reduction=reduction, label_smoothing=0.1, backend=backend
        )
        assert loss.item() == pytest.approx(value, nan_ok=True)
        assert not any(g.any() for g in torch.autograd.grad(loss, leaves))


def test_ignored_rows_do_not_matter(backend):
    hidden, weight, target = operands(6, 4, 9, ignored=0)
    target[2] = -100
    hidden[2] = math.nan
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, backend=backend)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite()
    assert not grad[2].any()
    assert grad[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_ignored_targets_do_not_matter(backend, reduction):
    hidden, weight, target = operands(6, 4, 9, ignored=0)
    target[2] = -100
    hidden.requires_grad_(), weight.requires_grad_()
    found = []
    for value in (math.nan, 1.0):
        factor = torch.linspace(0, 2, 6)
        factor[2] = value
        loss = linear_cross_entropy(
            hidden, weight, target, token_weight=factor, reduction=reduction, backend=backend
        )
        found.append([loss, *torch.autograd.grad(loss.sum(), (hidden, weight))])
    assert all(map(torch.equal, *found))
    assert all(x.isfinite().all() for x in found[0])


def test_no_weight_counts(backend):
    hidden, weight, target = operands(5, 4, 7, ignored=0)
    loss = linear_cross_entropy(
        hidden.requires_grad_(), weight, target, token_weight=torch.zeros(5), backend=backend
    )
    assert loss.isnan()
    assert not torch.autograd.grad(loss, hidden)[0].any()


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (3,), (2, 3)], ids=str)
def test_the_losses_of_each_target(backend, lead):
    hidden, target = torch.randn(*lead, 4, requires_grad=True), torch.randint(9, lead)
    weight = torch.randn(9, 4, requires_grad=True)
    options = {"label_smoothing": 0.1, "reduction": "none", "backend": backend}
    loss, nll, correct = linear_cross_entropy(
        hidden, weight, target, return_nll=True, return_correct=True, **options
    )
    assert loss.shape == nll.shape == lead
    assert correct.shape == ()
    assert not nll.requires_grad
    expected = F.cross_entropy(
        F.linear(hidden, weight).view(-1, 9), target.view(-1), reduction="none", label_smoothing=0.1
    ).view(lead)
    torch.testing.assert_close(loss, expected)
    grad, leaves = torch.randn(lead), (hidden, weight)
    got = torch.autograd.grad(loss, leaves, grad)
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaves, grad))


def test_strided_operands(backend):
    hidden, weight, target = operands(10, 12, 33)
    wide = torch.randn(10, 30)
    wide[:, 5:17] = hidden
    views = wide[:, 5:17], weight.t().contiguous().t(), target.repeat_interleave(2)[::2]
    assert not any(v.is_contiguous() for v in views)
    got = linear_cross_entropy(*views, backend=backend)
    torch.testing.assert_close(got, linear_cross_entropy(hidden, weight, target, backend=backend))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [4, None])
def test_counts_the_targets_with_the_largest_logit(backend, dtype, shape, chunk):
    hidden, weight, target = operands(*shape, dtype)
    logits = F.linear(hidden, weight)
    # Every other target is right, as far as it counts.
    target[::2] = logits.argmax(1)[::2].where(target[::2] >= 0, -100)
    hidden.requires_grad_()
    options = {"label_smoothing": 0.1, "chunk_size": chunk, "backend": backend}
    plain = linear_cross_entropy(hidden, weight, target, return_nll=True, **options)
    loss, nll, correct = linear_cross_entropy(
        hidden, weight, target, return_nll=True, return_correct=True, **options
    )
    assert correct.dtype == torch.int64
    assert correct.item() == (logits.argmax(1) == target).sum().item()
    assert (loss.item(), nll.item()) == (plain[0].item(), plain[1].item())
    loss.backward()
    assert not correct.requires_grad
    _, alone = linear_cross_entropy(hidden, weight, target, return_correct=True, **options)
    assert alone.item() == correct.item()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_for_several_factors_at_once(backend, reduction):
    hidden, weight, target = operands(9, 8, 33)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss():
        return linear_cross_entropy(*leaves, target, reduction=reduction, backend=backend)

    factors = torch.rand(2, *loss().shape)
    several = torch.autograd.grad(loss(), leaves, factors, is_grads_batched=True)
    for i, factor in enumerate(factors):
        one = torch.autograd.grad(loss(), leaves, factor)
        assert all(torch.equal(a[i], b) for a, b in zip(several, one, strict=True))


@pytest.mark.parametrize(
    "trainable",
    [(), ("x",), ("linear_weight",), ("linear_bias",), ("x", "linear_weight", "linear_bias")],
)
def test_only_what_is_wanted_is_computed(backend, trainable):
    hidden, weight, target = operands(300, 8, 33)
    leaves = {"x": hidden, "linear_weight": weight, "linear_bias": torch.randn(33)}
    for name in trainable:
        leaves[name].requires_grad_()

    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.profiler.profile() as profile:
            linear_cross_entropy(**leaves, target=target, chunk_size=300, backend=backend)
        names = [event.name for event in profile.function_events]
        count = sum(names.count(f"aten::{name}") for name in ("mm", "addmm", "addmm_"))
        assert count == 1 + enabled * len({"x", "linear_weight"}.intersection(trainable))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(tolerances, backend, dtype, reduction):
    """The same as with cast operands; the gradient of an fp32 weight is never rounded."""
    hidden, weight, target = operands(37, 24, 300)
    given = hidden, weight, torch.randn(300)
    h, w, b = leaves = [t.detach().requires_grad_() for t in given]
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(
            h, w, target, linear_bias=b, label_smoothing=0.1, reduction=reduction, backend=backend
        )
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert {g.dtype for g in grads} == {torch.float32}

    def plain(kind):
        h, w, b = cast = [t.to(dtype).to(kind).requires_grad_() for t in given]
        out = reference(h, w, target, bias=b, label_smoothing=0.1, reduction=reduction)[0]
        return torch.autograd.grad(out.sum(), cast)

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
        loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk_size=T // 32)
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
        linear_cross_entropy(hidden, weight, target, chunk_size=T // 32)
    assert forward.peak < 0.035 * 4 * T * V


def test_peak_memory_of_each_token(meter):
    """Autograd keeps no copy; backward has the gradients and one chunk of logits."""
    T, D, V = 1024, 64, 4000
    hidden, weight, target = operands(T, D, V)
    hidden.requires_grad_(), weight.requires_grad_()
    options = {"token_weight": torch.rand(T), "reduction": "none", "chunk_size": T // 32}
    with meter() as forward:
        loss = linear_cross_entropy(hidden, weight, target, **options)
    assert forward.left < 8 * T + 2000
    assert forward.peak < 0.035 * 4 * T * V
    with meter() as backward:
        loss.mean().backward()
    assert backward.peak < hidden.nbytes + weight.nbytes + 0.04 * 4 * T * V


def test_chunks_on_a_gpu_have_enough_rows_for_its_products():
    assert [chunk_rows(T, 32_000, "cpu") for T in (100, 8192, 65_536)] == [100, 256, 2048]
    assert [chunk_rows(T, 32_000, "cuda") for T in (100, 8192, 65_536)] == [100, 1024, 2048]
    assert [chunk_rows(8192, V, "cuda") for V in (2, 4096, 152_000)] == [8192, 2048, 1024]
