"""deepfast.ops.linear_cross_entropy: against float64, targets that do not count, its memory."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from deepfast.cases import sentences
from deepfast.cases.case import Rows
from deepfast.ops import linear_cross_entropy
from deepfast.reference.linear_cross_entropy import linear_cross_entropy as reference
from tests.ops.cases import LOW, assert_agrees, equal
from tests.tolerances import assert_accurate

MODULE = importlib.import_module("deepfast.ops.linear_cross_entropy")


def operands(T, D, V, dtype=torch.float32, ignored=0.0):
    """Leaves x and weight, and targets of which some are ignored."""
    hidden = torch.randn(T, D).to(dtype).requires_grad_()
    weight = (2 * torch.randn(V, D) / D**0.5).to(dtype).requires_grad_()
    target = torch.randint(V, (T,)).where(torch.rand(T) >= ignored, -100)
    target[: T // 2 + 1].clamp_(min=0)
    return hidden, weight, target


# Sizes that fit no block or vector, and a vocabulary beyond 16 bits. Of one word the gradient is 0
# but for the rounding of 1 - smoothing, which the plain form need not share.
ONE, ODD, LARGE = Rows((1,), 1), Rows((37,), 24, apart=3), Rows((3,), 8)
CASES = [
    (ONE, 2, {"chunk": 1, "bias": True}),
    (ONE, 2, {"reduction": "none", "weighted": True}),
    (ODD, 1001, {"chunk": 4, "label_smoothing": 0.6, "bias": True}),
    (ODD, 1001, {"chunk": 4, "reduction": "none", "bias": True, "label_smoothing": 1.0}),
    (ODD, 1001, {"chunk": 4, "weighted": True, "bias": True}),
    (ODD, 1001, {"reduction": "sum", "weighted": True}),
    (Rows((9,), 64), 512, {"chunk": 4, "reduction": "none", "weighted": True, "bias": True}),
    (LARGE, 70_001, {"chunk": 1, "reduction": "none", "label_smoothing": 0.6}),
    (Rows((2, 0), 4), 9, {"reduction": "none", "weighted": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "words", "options"), CASES, ids=str)
def test_agrees(backend, dtype, rows, words, options):
    assert_agrees(sentences.linear_cross_entropy("", rows, words, **options), backend, dtype)


def test_logits_far_apart_and_not_finite(backend):
    """No overflow of the exponential nor, in fp16, of the logits; exact zeros far from the
    largest."""
    hidden = torch.tensor([[4.0], [-4.0]], dtype=torch.float16)
    weight = torch.tensor([[3e4], [0.0], [-3e4]], dtype=torch.float16, requires_grad=True)
    options = {"target": torch.tensor([0, 1]), "reduction": "sum", "backend": backend}
    loss = linear_cross_entropy(hidden, weight, **options)
    assert loss.item() == 4 * weight[0].item()
    loss.backward()
    assert weight.grad.tolist() == [[0.0], [4.0], [-4.0]]
    for value in (torch.inf, torch.nan):
        hidden[1] = value
        assert linear_cross_entropy(hidden, weight[::2], **options).isnan()


@pytest.mark.parametrize(("reduction", "value"), [("mean", torch.nan), ("sum", 0.0)])
def test_nothing_counts(backend, reduction, value):
    """NaN for a mean, as in torch; no gradient."""
    hidden, weight, target = operands(5, 4, 7)
    options = {"label_smoothing": 0.1, "reduction": reduction, "backend": backend}
    for given in ({"target": torch.full((5,), -100)}, {"token_weight": torch.zeros(5)}):
        loss = linear_cross_entropy(hidden, weight, **{"target": target} | given, **options)
        assert loss.item() == pytest.approx(value, nan_ok=True)
        assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_and_weights_of_ignored_targets_do_not_matter(backend, reduction):
    hidden, weight, target = operands(6, 4, 9)
    target[2] = -100
    found = []
    for row, factor in ((1.0, 1.0), (1.0, torch.nan), (torch.nan, 1.0)):
        hidden.data[2], factors = row, torch.linspace(0, 2, 6)
        factors[2] = factor
        options = {"token_weight": factors, "reduction": reduction, "backend": backend}
        loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, **options)
        found.append([loss, *torch.autograd.grad(loss.sum(), (hidden, weight))])
    assert all(x.isfinite().all() for x in found[0])
    assert not found[0][1][2].any()
    assert equal(found[0], found[1])
    # A row that is NaN shows in the product that is the weight's gradient.
    assert equal(found[0][:2], found[2][:2])
    # Without smoothing the nll is the loss, with its weights and reduction.
    hidden.data[2], options["token_weight"] = 1.0, torch.linspace(0, 2, 6)
    loss, nll = linear_cross_entropy(hidden, weight, target, return_nll=True, **options)
    torch.testing.assert_close(nll, loss.detach())


def test_strided_operands(backend):
    hidden, weight, target = operands(10, 12, 33)
    views = hidden, weight.detach().t().contiguous().t(), target.repeat_interleave(2)[::2]
    got = linear_cross_entropy(*views, backend=backend)
    torch.testing.assert_close(got, linear_cross_entropy(hidden, weight, target, backend=backend))


SHAPES = (1, 1, 2), (3, 8, 70_001), (37, 24, 1001)


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, LOW, strict=True)), ids=str)
@pytest.mark.parametrize("chunk", [4, None])
def test_what_else_is_returned(backend, shape, dtype, chunk):
    """The loss without smoothing, and how many targets have the largest logit; neither has a
    gradient."""
    hidden, weight, target = operands(*shape, dtype, ignored=0.3)
    # Every other target is right, as far as it counts.
    best = F.linear(hidden, weight).argmax(1)
    target[::2] = best[::2].where(target[::2] >= 0, -100)
    options = {"label_smoothing": 0.1, "chunk_size": chunk, "backend": backend}
    both = {"return_nll": True, "return_correct": True}
    loss, nll, correct = linear_cross_entropy(hidden, weight, target, **both, **options)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, target, **options))
    assert not any(x.requires_grad for x in (nll, correct))
    assert correct.dtype == torch.int64
    assert correct.item() == (best == target).sum().item()
    logits = F.linear(hidden, weight).float(), F.linear(hidden.double(), weight.double())
    assert_accurate(nll, *(F.cross_entropy(x, target) for x in logits), dtype)


@pytest.mark.parametrize(
    "trainable",
    [(), ("x",), ("linear_weight",), ("linear_bias",), ("x", "linear_weight", "linear_bias")],
)
def test_only_what_is_wanted_is_computed(backend, trainable):
    hidden, weight, target = operands(300, 8, 33)
    leaves = {"x": hidden, "linear_weight": weight, "linear_bias": torch.randn(33)}
    leaves = {name: x.detach().requires_grad_(name in trainable) for name, x in leaves.items()}
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.profiler.profile() as profile:
            linear_cross_entropy(**leaves, target=target, chunk_size=300, backend=backend)
        names = [event.name for event in profile.function_events]
        count = sum(names.count(f"aten::{name}") for name in ("mm", "addmm", "addmm_"))
        assert count == 1 + enabled * len({"x", "linear_weight"}.intersection(trainable))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(backend, dtype, reduction):
    """The same as with cast operands; the gradient of an fp32 weight is never rounded."""
    *given, target = operands(37, 24, 300, ignored=0.3)
    h, w, b = leaves = [*given, torch.randn(300, requires_grad=True)]
    options = {"label_smoothing": 0.1, "reduction": reduction}
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(h, w, target, linear_bias=b, **options, backend=backend)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss.sum(), leaves)

    def plain(kind):
        h, w, b = cast = [t.detach().to(dtype).to(kind).requires_grad_() for t in leaves]
        return torch.autograd.grad(reference(h, w, target, bias=b, **options)[0].sum(), cast)

    for got, near, exact in zip(grads, plain(dtype), plain(torch.float64), strict=True):
        assert_accurate(got, near, exact, dtype)
    for grad in grads[1:]:
        assert not torch.equal(grad, grad.to(dtype).float())


def test_small_gradients_survive_float16(backend):
    """The factor of the mean, and a loss scale, are applied in fp32 to unscaled gradients."""
    hidden, weight, target = operands(4096, 8, 40, torch.float16)
    loss = linear_cross_entropy(hidden, weight, target, backend=backend)
    (scaled,) = torch.autograd.grad(loss * 2.0**14, hidden)
    exact = hidden.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(F.linear(exact, weight.double()), target), exact)
    torch.testing.assert_close(scaled.double() / 2**14, grad, rtol=0, atol=1e-3 * grad.max().item())


# An eighth of T = 8192, V = 32000, D = 512 each, in as many chunks. The allocator is asked: the
# inside of an op is hidden from `deepfast.memory.LiveBytes`.
MANY = 1024, 64, 4000
LOGITS = 4 * 1024 * 4000


@pytest.mark.parametrize(
    ("weights", "cast"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=str,
)
def test_peak_memory(meter, monkeypatch, weights, cast):
    """Beyond operands, their gradients and an accumulator in fp32: under 5% of the fp32 logits."""
    (T, _, V), (hidden, weight, target) = MANY, operands(*MANY, weights)
    monkeypatch.setattr(MODULE, "WIDENED", 250)
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
    assert peak - hidden.nbytes - 4 * weight.numel() < 0.05 * LOGITS
    with meter() as backward:
        loss.backward()
    # In fp32 the kept tensor becomes the gradient; a CPU widens a product of 16 bits.
    wide = cast or weights == torch.bfloat16
    rounded = 0 if weights == torch.float32 else weight.nbytes
    assert backward.peak < 2000 + rounded + (8 * hidden.numel() if wide else 0)


@pytest.mark.parametrize("each", [False, True])
def test_peak_memory_without_gradients_in_forward(meter, each):
    """Of the loss of each token autograd keeps no copy; backward has the gradients and one chunk of
    logits."""
    T, (hidden, weight, target) = MANY[0], operands(*MANY)
    options = {"token_weight": torch.rand(T), "reduction": "none"} if each else {}
    with meter() as forward, torch.set_grad_enabled(each):
        loss = linear_cross_entropy(hidden, weight, target, chunk_size=T // 32, **options)
    assert forward.left < 8 * T + 2000
    assert forward.peak < 0.035 * LOGITS
    if each:
        with meter() as backward:
            loss.mean().backward()
        assert backward.peak < hidden.nbytes + weight.nbytes + 0.04 * LOGITS
