"""The kernels of cross entropy: sizes, options, and targets and logits that are not ordinary."""

import math

import pytest
import torch

from deepfast import backend
from tests.kernels.agreement import LOW, agree, apart

OP, NAME, IGNORED = "linear_cross_entropy", "cross_entropy", -7
# Less than a block of any kernel, whole ones, and a remainder; the last beyond 16 bits.
SHAPES = [(0, 64), (1, 1), (5, 17), (3, 512), (4, 1001), (2, 4096), (2, 8195), (1, 70_001)]


def operands(T, V):
    target = torch.randint(V, (T,))
    target[1::3] = IGNORED
    given = {"T": T, "V": V, "logits": 3 * torch.randn(T, V)}
    return given | {"target": target, "ignore_index": IGNORED}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("T", "V"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, V, dtype):
    agree(tolerances, kernels, NAME, dtype, **operands(T, V))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("write_grad", [True, False])
def test_options(tolerances, kernels, smoothing, write_grad):
    options = {"label_smoothing": smoothing, "write_grad": write_grad}
    agree(tolerances, kernels, NAME, torch.bfloat16, apart, **operands(4, 1000) | options)


def losses(launches, x, target, smoothing=0.0):
    x, loss, nll = x.clone(), *torch.full((2, len(target)), math.nan)
    options = {"label_smoothing": smoothing, "ignore_index": IGNORED, "write_grad": True}
    launches.cross_entropy(logits=x, target=target, loss=loss, nll=nll, **options)
    return {"dlogits": x, "loss": loss, "nll": nll}


@pytest.mark.parametrize("V", [5, 600])
def test_far_apart_and_not_finite(kernels, V):
    x = torch.zeros(6, V)
    x[0, 0], x[1, 1], x[2, :], x[3, 2] = 3e38, -3e38, -math.inf, math.nan
    x[4, 3], x[5, 1:] = math.inf, -math.inf
    target = torch.zeros(6, dtype=torch.int64)
    reference = backend.choose(OP, "reference", "cpu", torch.float32)[1]
    got, want = (losses(launches, x, target) for launches in (kernels(OP), reference))
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got["nll"].isnan().tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("target", [-1, 40, 1 << 40])
def test_a_target_out_of_range_is_nan(kernels, target):
    """A device cannot raise; nothing outside the row is read or written."""
    wide = torch.full((3, 48), math.nan)
    wide[:, :40] = torch.randn(3, 40)
    got = losses(kernels(OP), wide[:, :40], torch.tensor([1, target, 2]), 0.1)
    assert got["loss"].isnan().tolist() == got["nll"].isnan().tolist() == [False, True, False]
    assert wide[:, 40:].isnan().all()
