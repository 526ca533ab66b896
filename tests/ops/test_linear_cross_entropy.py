"""deepfast.ops.linear_cross_entropy against float64, on every backend of a CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import linear_cross_entropy
from deepfast.reference.linear_cross_entropy import linear_cross_entropy as reference
from tests.ops.losses import operands

LOW = [torch.float32, torch.bfloat16, torch.float16]
# T, D, V: sizes that fit no block or vector, and a vocabulary beyond 16 bits.
SHAPES = [(1, 1, 1), (5, 3, 2), (37, 24, 1001), (9, 64, 512), (3, 8, 70_001)]


BIASED = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


@pytest.fixture
def backend(exact_backend):
    """It has no CUDA kernels; Triton's are tested in tests/kernels."""
    return exact_backend


def results(form, given, dtype, factor=1.0):
    """Loss, nll and gradients by name, leaves in ``dtype``."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in given.items()}
    loss, nll = form(**leaves)
    grads = torch.autograd.grad(loss * factor, list(leaves.values()))
    named = dict(zip(leaves, grads, strict=True))
    return {"loss": loss.detach(), "nll": nll.detach()} | named


def compare(tolerances, backend, shape, dtype, factor=1.0, biased=False, **options):
    hidden, weight, target = operands(*shape, dtype)
    given = {"hidden": hidden, "weight": weight}
    if biased:
        given["bias"] = torch.randn(len(weight)).to(dtype)
    spec = {name: value for name, value in options.items() if name != "chunk"}

    def fused(**leaves):
        return linear_cross_entropy(
            **leaves, target=target, return_nll=True, backend=backend, **options
        )

    def plain(**leaves):
        return reference(**leaves, target=target, **spec)

    tolerances.assert_all_accurate(
        results(fused, given, dtype, factor),
        results(plain, given, tolerances.plain_dtype(dtype), factor),
        results(plain, given, torch.float64, factor),
        dtype,
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@BIASED
def test_agrees(tolerances, ran, backend, dtype, shape, smoothing, biased):
    options = {"label_smoothing": smoothing, "chunk": 4, "biased": biased}
    with ran("linear_cross_entropy", backend):
        compare(tolerances, backend, shape, dtype, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.6, 1.0])
def test_options(tolerances, backend, reduction, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(tolerances, backend, (37, 24, 100), torch.float32, factor=-0.3, **options)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@BIASED
def test_agrees_in_float64(tolerances, exact_backend, shape, biased):
    options = {"label_smoothing": 0.1, "chunk": 3, "biased": biased}
    compare(tolerances, exact_backend, shape, torch.float64, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_is_torchs(backend, smoothing):
    hidden, weight, target = operands(2 * 3 * 5, 8, 33)
    hidden, target = hidden.view(2, 3, 5, 8), target.view(2, 3, 5)
    for options in ({"ignore_index": -100}, {"ignore_index": target[0, 0, 0].item()}):
        target = target.clamp(min=0) if options["ignore_index"] >= 0 else target
        loss = linear_cross_entropy(
            hidden, weight, target, label_smoothing=smoothing, backend=backend, **options
        )
        logits = F.linear(hidden, weight).flatten(0, 2)
        expected = F.cross_entropy(logits, target.flatten(), label_smoothing=smoothing, **options)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("chunk", [1, 7, 37, 1000, None])
@BIASED
def test_chunks_agree(tolerances, backend, chunk, biased):
    options = {"label_smoothing": 0.1, "chunk": chunk, "biased": biased}
    compare(tolerances, backend, (37, 24, 300), torch.bfloat16, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck(exact_backend, smoothing, reduction):
    hidden, weight, target = operands(6, 4, 9, torch.float64)
    bias = torch.randn(9, dtype=torch.float64)
    leaves = hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()

    def run(h, w, b):
        return linear_cross_entropy(
            h, w, target, bias=b, label_smoothing=smoothing, reduction=reduction, chunk=4,
            backend=exact_backend,
        )  # fmt: skip

    torch.autograd.gradcheck(run, leaves)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(backend):
    hidden, target = torch.zeros(3, 4), torch.tensor([0, 1, 49])
    loss, nll = linear_cross_entropy(
        hidden, torch.randn(50, 4), target, label_smoothing=0.1, reduction="sum", return_nll=True,
        backend=backend,
    )  # fmt: skip
    assert loss.item() == pytest.approx(3 * math.log(50))
    assert nll.item() == pytest.approx(3 * math.log(50))
    assert not nll.requires_grad


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_logits_far_apart(backend, dtype):
    """No overflow of the exponential, and exact zeros far from the largest."""
    hidden = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    weight = torch.tensor([[3e4], [0.0], [-3e4]], dtype=dtype, requires_grad=True)
    target = torch.tensor([0, 1])
    loss = linear_cross_entropy(hidden, weight, target, reduction="sum", backend=backend)
    assert loss.item() == weight[0].item()
    loss.backward()
    assert weight.grad.tolist() == [[0.0], [1.0], [-1.0]]


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


def test_no_tokens(backend):
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    bias, target = torch.randn(7, requires_grad=True), torch.empty(0, dtype=torch.int64)
    assert linear_cross_entropy(hidden, weight, target, backend=backend).isnan()
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum", backend=backend)
    loss.backward()
    assert not bias.grad.any()
    assert loss.item() == 0
    assert hidden.grad.shape == (0, 4)
    assert not weight.grad.any()


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
    options = {"label_smoothing": 0.1, "chunk": chunk, "backend": backend}
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


# ---- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": [1.0]}, TypeError, "hidden must be a tensor, got list"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"weight": torch.ones(7, 5)}, ValueError, r"weight must be \(V, 4\).*got \(7, 5\)"),
        ({"weight": torch.ones(0, 4)}, ValueError, r"with V >= 1, got \(0, 4\)"),
        ({"weight": torch.ones(7, 4).half()}, ValueError, "be torch.float32, got torch.float16"),
        ({"weight": torch.ones(7, 4, device="meta")}, ValueError, "weight must be on cpu, got me"),
        ({"bias": torch.ones(6)}, ValueError, r"bias must be \(7,\), got \(6,\)"),
        ({"bias": torch.ones(7).half()}, ValueError, "bias must be torch.float32, got to"),
        ({"target": [1, 2, 3]}, TypeError, "target must be a tensor, got list"),
        ({"target": torch.tensor([0, 6, 1]).to_sparse()}, TypeError, "target must be a dense ten"),
        ({"target": torch.ones(3)}, ValueError, r"target must be torch.int64 \(3,\), got torch.fl"),
        ({"target": torch.ones(3, 1).long()}, ValueError, r"got torch.int64 \(3, 1\)"),
        ({"target": torch.tensor([0, 7, 1])}, ValueError, r"target must be in \[0, 7\).*got 7"),
        ({"target": torch.tensor([0, -1, 1])}, ValueError, r"\[0, 7\) or -100, got -1"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing must be between 0 and 1"),
        ({"label_smoothing": "a"}, ValueError, "label_smoothing must be between 0 and 1, got 'a'"),
        ({"reduction": "none"}, ValueError, "reduction must be one of mean, sum, got 'none'"),
        ({"chunk": 0}, ValueError, "chunk must be None or at least 1, got 0"),
        ({"hidden": torch.ones(3, 4).int()}, ValueError, "weight must be torch.int32"),
    ],
)  # fmt: skip
def test_refuses(change, error, message):
    args = {
        "hidden": torch.ones(3, 4), "weight": torch.ones(7, 4), "target": torch.tensor([0, 6, 1])
    } | change  # fmt: skip
    given = [args.pop(name) for name in ("hidden", "weight", "target")]
    with pytest.raises(error, match=message):
        linear_cross_entropy(*given, **args)


@pytest.mark.parametrize("name", ["ignore_index", "chunk"])
def test_whole_numbers_of_more_than_64_bits(name):
    hidden, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match=f"{name} must fit into 64 bits, got 1000"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), **{name: 10**30})
