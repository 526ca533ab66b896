"""deepfast.ops.linear_cross_entropy against float64, on every backend of a CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend as backends
from deepfast.cases import ops
from deepfast.cases.case import Rows
from deepfast.ops import linear_cross_entropy
from tests.ops.cases import assert_agrees
from tests.ops.losses import operands

LOW = [torch.float32, torch.bfloat16, torch.float16]
# T, D, V: sizes that fit no block or vector, and a vocabulary beyond 16 bits.
SHAPES = [(1, 1, 1), (5, 3, 2), (37, 24, 1001), (9, 64, 512), (3, 8, 70_001)]


@pytest.fixture
def backend(exact_backend):
    """It has no CUDA kernels; Triton's are tested in tests/kernels."""
    return exact_backend


@pytest.mark.parametrize("dtype", list(backends.DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_agrees(backend, dtype, shape, smoothing, biased, reduction, chunk):
    T, D, V = shape
    options = {"smoothing": smoothing, "reduction": reduction, "bias": biased, "chunk": chunk}
    assert_agrees(ops.linear_cross_entropy("", Rows((T,), D), V, **options), backend, dtype)


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
