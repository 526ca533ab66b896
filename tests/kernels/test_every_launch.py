"""Every launch over rows against the reference; attention and the LSTM have files of their own."""

import pytest
import torch

from deepfast.launches import LAUNCHES
from tests.kernels.agreement import ABSENT, BOTH, LOW, agree, apart, numbers, run, served

OTHERS = "attention", "peephole_lstm"
NAMES = [name for name, launch in LAUNCHES.items() if launch.op not in OTHERS]
pytestmark = [BOTH, pytest.mark.only_if(lambda kernels, name: served(kernels, name))]
SHAPES = [(0, 64), (1, 1), (5, 17), (17, 64), (5, 100), (2, 255), (5, 512)]


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


def sizes(name, T, D):
    return {"T": T, "D": D, "V": D, **ABSENT.get(name, {})}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_agrees(tolerances, kernels, name, T, D, dtype):
    agree(tolerances, kernels, name, dtype, **sizes(name, T, D))


@pytest.mark.each_value
@pytest.mark.parametrize("D", [17, 64])
@pytest.mark.parametrize("name", NAMES)
def test_rows_apart(tolerances, kernels, name, D):
    agree(tolerances, kernels, name, torch.bfloat16, apart, **sizes(name, 5, D))


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_alike_to_the_bit(kernels, name):
    given = numbers(name, **sizes(name, 37, 64))
    launches = kernels(LAUNCHES[name].op)
    first, second = (run(launches, name, given, torch.bfloat16, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "name", ["layer_norm_backward", "boundary_backward", "attention_boundary_backward"]
)
def test_many_tiles(tolerances, kernels, name):
    """More tiles than programs: the sums over tokens continue from tile to tile."""
    agree(tolerances, kernels, name, torch.float32, **sizes(name, 70, 512))
