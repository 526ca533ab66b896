"""The activation kernels against the launchers of the reference in float64."""

import pytest
import torch

from deepfast.reference import launchers as reference
from deepfast.reference.dropout import dropout_mask

OP = "activation"
KINDS = ("relu", "gelu")
LOW = (torch.float32, torch.bfloat16, torch.float16)
# Fewer channels than a tile, several tiles of them with and without a rest, many tokens.
SHAPES = [(0, 64), (1, 1), (5, 17), (70, 64), (3, 100), (2, 255), (9, 512), (300, 24)]
SEED, P = torch.tensor(3 << 40), 0.3


def strided(shape, dtype):
    """Rows as in a wider tensor: an odd distance apart."""
    return torch.empty(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]


def run(launch, h, dout, kind, p, dtype, rows=torch.empty, inplace=False):
    """Forward, and backward from the reference's rounded result."""
    h, dout = (rows(x.shape, dtype=dtype).copy_(x) for x in (h, dout))
    seed = SEED if p else None
    saved = h.clone()
    if kind == "relu":
        reference.activation_forward(h, kind, p, seed, saved)
    out, dh = (h, dout) if inplace else (rows(h.shape, dtype=dtype) for _ in range(2))
    launch.activation_forward(h, kind, p, seed, out)
    launch.activation_backward(dout, saved, kind, p, None if kind == "relu" else seed, dh)
    return {"out": out, "dh": dh}


def compare(tolerances, kernels, T, F, kind, p, dtype, rows=torch.empty):
    h, dout = (torch.randn(T, F).to(dtype) for _ in range(2))
    got = run(kernels, h, dout, kind, p, dtype, rows)
    plain = run(reference, h, dout, kind, p, dtype)
    exact = run(reference, h, dout, kind, p, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)
    assert all(torch.equal(got[name] == 0, plain[name] == 0) for name in got)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "F"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, F, kind, dtype):
    compare(tolerances, kernels, T, F, kind, P, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout(tolerances, poison, kernels, kind):
    compare(tolerances, kernels, 5, 300, kind, 0.0, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("F", [17, 64, 512])
def test_rows_apart(tolerances, poison, kernels, kind, F):
    compare(tolerances, kernels, 5, F, kind, P, torch.bfloat16, rows=strided)


@pytest.mark.parametrize("kind", KINDS)
def test_more_channels_than_other_kernels_hold(tolerances, kernels, kind):
    compare(tolerances, kernels, 2, 8200, kind, P, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("F", [37, 512])
def test_in_place(kernels, kind, F):
    h, dout = torch.randn(2, 7, F).unbind()
    apart = run(kernels, h, dout, kind, P, torch.float32)
    again = run(kernels, h, dout, kind, P, torch.float32, inplace=True)
    assert all(torch.equal(apart[name], again[name]) for name in apart)
    # The gradient overwrites the saved tensor.
    saved = h.clone()
    if kind == "relu":
        kernels.activation_forward(h, kind, P, SEED, saved)
    kernels.activation_backward(dout, saved, kind, P, SEED, saved)
    assert torch.equal(saved, apart["dh"])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_the_references(kernels, kind):
    h = torch.ones(6, 700)
    out, dh = run(kernels, h, h, kind, P, torch.float32).values()
    kept = dropout_mask(int(SEED), 6, 700, P) != 0
    assert torch.equal(out != 0, kept)
    assert torch.equal(dh != 0, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kernels, kind):
    h = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 0.0, 1e-40, -1e-40]])
    dout = torch.ones_like(h)
    got = run(kernels, h, dout, kind, 0.0, torch.float32)
    expected = run(reference, h, dout, kind, 0.0, torch.float32)
    for name in got:
        torch.testing.assert_close(got[name], expected[name], equal_nan=True, msg=name)
    for value in run(kernels, h, h, kind, 1.0, torch.float32).values():
        assert not value.any()


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_alike_to_the_bit(kernels, kind):
    h, dout = torch.randn(2, 37, 64).bfloat16().unbind()
    first, second = (run(kernels, h, dout, kind, P, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
