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


def run(launch, h, bias, dout, kind, p, dtype, rows=torch.empty, inplace=False):
    """Forward, and backward from the reference's rounded result."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    h, dout = (rows(x.shape, dtype=dtype).copy_(x) for x in (h, dout))
    bias = None if bias is None else bias.to(compute)
    seed = SEED if p else None
    saved = h.clone()
    if kind == "relu":
        reference.activation_forward(h, bias, kind, p, seed, saved)
    out, dh = (h, dout) if inplace else (rows(h.shape, dtype=dtype) for _ in range(2))
    launch.activation_forward(h, bias, kind, p, seed, out)
    dbias = None if bias is None else torch.empty_like(bias)
    relu = kind == "relu"
    launch.activation_backward(
        dout, saved, None if relu else bias, kind, p, None if relu else seed, dh, dbias
    )
    return {"out": out, "dh": dh} | ({} if bias is None else {"dbias": dbias})


def compare(tolerances, kernels, T, F, kind, p, dtype, rows=torch.empty, with_bias=True):
    h, dout = (torch.randn(T, F).to(dtype) for _ in range(2))
    bias = torch.randn(F).to(dtype) if with_bias else None
    got = run(kernels, h, bias, dout, kind, p, dtype, rows)
    plain = run(reference, h, bias, dout, kind, p, dtype)
    exact = run(reference, h, bias, dout, kind, p, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)
    assert all(torch.equal(got[name] == 0, plain[name] == 0) for name in ("out", "dh"))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "F"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, F, kind, dtype):
    compare(tolerances, kernels, T, F, kind, P, dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout(tolerances, poison, kernels, kind, with_bias):
    compare(tolerances, kernels, 5, 300, kind, 0.0, torch.float32, with_bias=with_bias)


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
    bias = torch.randn(F)
    apart = run(kernels, h, bias, dout, kind, P, torch.float32)
    again = run(kernels, h, bias, dout, kind, P, torch.float32, inplace=True)
    assert all(torch.equal(apart[name], again[name]) for name in apart)
    # The gradient overwrites the saved tensor.
    saved = h.clone()
    if kind == "relu":
        kernels.activation_forward(h, bias, kind, P, SEED, saved)
    kernels.activation_backward(dout, saved, bias, kind, P, SEED, saved, None)
    assert torch.equal(saved, apart["dh"])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_the_references(kernels, kind):
    h = torch.ones(6, 700)
    out, dh = run(kernels, h, None, h, kind, P, torch.float32).values()
    kept = dropout_mask(int(SEED), 6, 700, P) != 0
    assert torch.equal(out != 0, kept)
    assert torch.equal(dh != 0, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kernels, kind):
    h = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 0.0, 1e-40, -1e-40]])
    dout = torch.ones_like(h)
    got = run(kernels, h, None, dout, kind, 0.0, torch.float32)
    expected = run(reference, h, None, dout, kind, 0.0, torch.float32)
    for name in got:
        torch.testing.assert_close(got[name], expected[name], equal_nan=True, msg=name)
    for value in run(kernels, h, torch.zeros(8), h, kind, 1.0, torch.float32).values():
        assert not value.any()


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_alike_to_the_bit(kernels, kind):
    h, dout = torch.randn(2, 37, 64).bfloat16().unbind()
    bias = torch.randn(64)
    first, second = (run(kernels, h, bias, dout, kind, P, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
