"""The kernels of the LSTM with peepholes against the launchers of the reference in float64."""

import pytest
import torch

from deepfast import backend
from deepfast.reference import launchers as reference

LOW = (torch.float32, torch.bfloat16, torch.float16)
# Less than a tile, whole ones, several of them with a rest, no step, no sentence.
SHAPES = [(1, 1, 1), (3, 5, 17), (2, 33, 16), (0, 3, 8), (2, 0, 8)]


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return backend.choose("peephole_lstm", "triton", device, torch.float32)[1]


def operands(T, B, H):
    return {
        "f": 2 * torch.randn(T, B, 4 * H), "weight": torch.randn(H, 4 * H) / H**0.5,
        "peephole": torch.randn(3, H), "h0": torch.randn(B, H), "c0": torch.randn(B, H),
        "dh": torch.randn(T, B, H), "dh_last": torch.randn(B, H), "dc_last": torch.randn(B, H),
    }  # fmt: skip


STATES = ("peephole", "c0", "dc_last")
"""Operands in the compute dtype."""


def run(launch, given, dtype, reverse, lengths, *, stored=None):
    """Results of both launches; the operands rounded to ``stored`` first."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = {
        name: None if t is None else t.to(wide if name in STATES else stored or dtype)
        .to(wide if name in STATES else dtype)
        for name, t in given.items()
    }  # fmt: skip
    T, B, H = x["f"].shape[0], x["f"].shape[1], x["f"].shape[2] // 4
    h, h_last, gates = (torch.empty(s, dtype=dtype) for s in ((T, B, H), (B, H), (T, B, 4 * H)))
    c, c_last = torch.empty(T, B, H, dtype=wide), torch.empty(B, H, dtype=wide)
    launch.peephole_lstm_forward(
        x["f"], x["weight"], x["peephole"], x["h0"], x["c0"], lengths, reverse, h, h_last, c_last,
        c, gates,
    )  # fmt: skip
    df, dh0 = torch.empty_like(gates), torch.empty_like(h_last)
    dc0, dpeephole = torch.empty_like(c_last), torch.empty(3, H, dtype=wide)
    launch.peephole_lstm_backward(
        x["dh"], x["dh_last"], x["dc_last"], x["weight"], x["peephole"], x["c0"], lengths, reverse,
        c, gates, df, dh0, dc0, dpeephole,
    )  # fmt: skip
    return {"h": h, "h_last": h_last, "c_last": c_last, "df": df, "dh0": dh0, "dc0": dc0,
            "dpeephole": dpeephole}  # fmt: skip


def compare(tolerances, kernels, given, dtype, reverse, lengths):
    tolerances.assert_all_accurate(
        run(kernels, given, dtype, reverse, lengths),
        run(reference, given, dtype, reverse, lengths),
        run(reference, given, torch.float64, reverse, lengths, stored=dtype),
        dtype,
    )


def some_lengths(T, B):
    return torch.arange(B) * 7 % (T + 1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("T", "B", "H"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, B, H, reverse):
    compare(tolerances, kernels, operands(T, B, H), torch.float32, reverse, some_lengths(T, B))


@pytest.mark.parametrize("dtype", LOW[1:], ids=str)
def test_agrees_in_16_bits(tolerances, poison, kernels, dtype):
    """A product deeper than its tile, too."""
    compare(tolerances, kernels, operands(2, 2, 70), dtype, True, some_lengths(2, 2))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("absent", [("h0", "dh"), ("h0", "c0", "dh_last", "dc_last")])
def test_without_what_may_be_absent(tolerances, poison, kernels, absent, reverse):
    given = operands(2, 5, 7) | dict.fromkeys(absent)
    compare(tolerances, kernels, given, torch.float32, reverse, None)


def test_without_anything_kept(poison, kernels):
    x = operands(2, 5, 7)
    outs = []
    for kept in (True, False):
        h, last = torch.empty(2, 5, 7), torch.empty(2, 5, 7)
        keep = (torch.empty(2, 5, 7), torch.empty(2, 5, 28)) if kept else (None, None)
        kernels.peephole_lstm_forward(
            x["f"], x["weight"], x["peephole"], None, None, None, False, h, *last, *keep
        )
        outs.append((h, last))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_a_length_out_of_range_is_the_nearest(kernels):
    x, lengths = operands(2, 4, 8), torch.tensor([-2, 0, 2, 9])
    got, want = (
        run(kernels, x, torch.float32, True, n) for n in (lengths, torch.tensor([0, 0, 2, 2]))
    )
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_two_runs_are_alike_to_the_bit(kernels):
    x = operands(2, 5, 9)
    first, second = (run(kernels, x, torch.bfloat16, True, some_lengths(2, 5)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
