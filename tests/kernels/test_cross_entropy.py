"""The cross-entropy kernels against the launcher of the reference in float64."""

import math

import pytest
import torch

from deepfast.reference import launchers as reference

OP = "linear_cross_entropy"
LOW = (torch.float32, torch.bfloat16, torch.float16)
# Less than a block of any kernel, whole ones, and a remainder; the last beyond 16 bits.
SHAPES = [(0, 64), (1, 1), (5, 17), (3, 512), (4, 1001), (2, 4096), (2, 8195), (1, 70_001)]
IGNORED = -7


def operands(T, V):
    target = torch.randint(V, (T,))
    target[1::3] = IGNORED
    return 3 * torch.randn(T, V), target


def rows(logits, dtype, apart=0):
    """Rows that are ``apart`` longer than needed; the gaps are NaN and must not change."""
    wide = torch.full((logits.shape[0], logits.shape[1] + apart), math.nan, dtype=dtype)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]], wide


def run(launch, logits, target, dtype, storage, smoothing=0.1, write_grad=True, apart=0):
    x, wide = rows(logits.to(storage), dtype, apart)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    loss, nll = torch.full((2, len(target)), math.nan, dtype=compute)
    launch.cross_entropy(x, target, smoothing, IGNORED, write_grad, loss, nll)
    assert wide[:, logits.shape[1] :].isnan().all()
    return {"dlogits": x, "loss": loss, "nll": nll}


def compare(tolerances, kernels, logits, target, dtype, **options):
    tolerances.assert_all_accurate(
        run(kernels, logits, target, dtype, dtype, **options),
        run(reference, logits, target, dtype, dtype, **options),
        run(reference, logits, target, torch.float64, dtype, **options),
        dtype,
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("T", "V"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, V, dtype):
    compare(tolerances, kernels, *operands(T, V), dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("write_grad", [True, False])
@pytest.mark.parametrize("apart", [0, 3, 8])
def test_options(tolerances, kernels, smoothing, write_grad, apart):
    options = {"smoothing": smoothing, "write_grad": write_grad, "apart": apart}
    compare(tolerances, kernels, *operands(4, 1000), torch.bfloat16, **options)


@pytest.mark.parametrize("V", [5, 600])
def test_far_apart_and_not_finite(kernels, V):
    x = torch.zeros(6, V)
    x[0, 0], x[1, 1], x[2, :], x[3, 2] = 3e38, -3e38, -math.inf, math.nan
    x[4, 3], x[5, 1:] = math.inf, -math.inf
    target = torch.zeros(6, dtype=torch.int64)
    got, want = (run(k, x, target, torch.float32, torch.float32, 0.0) for k in (kernels, reference))
    for name in got:
        torch.testing.assert_close(got[name], want[name], equal_nan=True, msg=name)
    assert got["nll"].isnan().tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("target", [-1, 40, 1 << 40])
def test_a_target_out_of_range_is_nan(kernels, target):
    """A device cannot raise; nothing outside the row is read or written."""
    x, targets = torch.randn(3, 40), torch.tensor([1, target, 2])
    got = run(kernels, x, targets, torch.float32, torch.float32, apart=8)
    assert got["loss"].isnan().tolist() == got["nll"].isnan().tolist() == [False, True, False]


def test_two_runs_are_alike_to_the_bit(kernels):
    x, target = operands(5, 3001)
    first, second = (run(kernels, x, target, torch.bfloat16, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
