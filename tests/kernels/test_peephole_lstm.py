"""The kernels of the LSTM with peepholes: lengths, both directions, and what may be missing."""

import pytest
import torch

from tests.kernels.agreement import LOW, agree, apart, numbers, plain, run

# Less than a tile, whole ones, several with a rest, a deep product, no step, no sentence.
SHAPES = [(1, 1, 1), (3, 5, 17), (2, 33, 16), (2, 2, 70), (0, 3, 8), (2, 0, 8)]
FORWARD, BACKWARD = "peephole_lstm_forward", "peephole_lstm_backward"


def sizes(P, N, H):
    return {"P": P, "N": N, "H": H, "lengths": torch.arange(N) * 7 % (P + 1)}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", [plain, apart])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_agrees(tolerances, poison, kernels, name, shape, layout, reverse, dtype):
    """And to the bit with another run."""
    given = sizes(*shape) | {"reverse": reverse}
    agree(tolerances, kernels, name, dtype, layout, **given)
    made = numbers(name, **given)
    first, second = (run(kernels("peephole_lstm"), name, made, dtype, dtype) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "absent",
    [
        ("h0", "dh", "c", "gates"), ("h0", "c0", "dh_last", "dc_last"), ("dh0", "dc0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_without_what_may_be_absent(tolerances, poison, kernels, name, absent, reverse):
    absent = [a for a in absent if name == FORWARD or a not in ("c", "gates")]
    given = {"P": 2, "N": 5, "H": 7, "lengths": None, "reverse": reverse}
    agree(tolerances, kernels, name, torch.float32, **given, **dict.fromkeys(absent))


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_a_length_out_of_range_is_the_nearest(kernels, name):
    given = numbers(name, P=2, N=4, H=8, reverse=True)
    got, want = (
        run(kernels("peephole_lstm"), name, given | {"lengths": n}, torch.float32, torch.float32)
        for n in (torch.tensor([-2, 0, 2, 9]), torch.tensor([0, 0, 2, 2]))
    )
    assert all(torch.equal(got[key], want[key]) for key in got)
