"""The kernels of the activation: both kinds, options, masks, results in place."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from tests.kernels.agreement import LOW, SEED, agree, numbers, run

KINDS = ("relu", "gelu")
P = 0.3


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    ("T", "F", "p", "bias"),
    [
        (0, 64, P, True), (70, 64, P, True), (3, 100, 0.0, False), (5, 300, 0.0, True),
        (300, 24, P, False), (2, 8200, P, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_agrees(tolerances, poison, kernels, kind, T, F, p, bias, dtype):
    given = {"T": T, "D": F, "kind": kind, "dropout_p": p} | ({} if bias else {"bias": None})
    agree(tolerances, kernels, "activation_forward", dtype, **given)
    given |= {} if bias else {"dbias": None}
    if kind == "relu":
        # The saved result is 0 where relu or dropout made it 0.
        given |= {"saved": torch.randn(T, F).relu(), "bias": None, "seed": None}
    got = agree(tolerances, kernels, "activation_backward", dtype, **given)
    if kind == "relu" and T > 0:
        assert torch.equal(got["dh"] != 0, given["saved"].to(dtype) != 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("F", [37, 512])
def test_in_place(kernels, kind, F):
    launches = kernels("activation")
    h, dout, bias = torch.randn(7, F), torch.randn(7, F), torch.randn(F)
    given = {"kind": kind, "dropout_p": P, "seed": SEED}
    out, again = torch.empty_like(h), h.clone()
    launches.activation_forward(h=h, bias=bias, out=out, **given)
    launches.activation_forward(h=again, bias=bias, out=again, **given)
    assert torch.equal(out, again)
    saved = out if kind == "relu" else h
    results = [torch.empty_like(h), dout.clone(), saved.clone()]
    for dh, d, s in zip(results, (dout, results[1], dout), (saved, saved, results[2]), strict=True):
        launches.activation_backward(dout=d, saved=s, bias=bias, dh=dh, **given)
    assert all(torch.equal(results[0], other) for other in results[1:])


SPECIAL = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 0.0, 1e-40, -1e-40]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["activation_forward", "activation_backward"])
def test_special_values(kernels, name, kind):
    given = {"T": 1, "D": 8, "kind": kind, "dropout_p": 0.0, "bias": None, "dbias": None}
    given |= {"h": SPECIAL, "saved": SPECIAL, "dout": torch.ones(1, 8)}
    made = numbers(name, **given)
    reference = backend.choose(LAUNCHES[name].op, "reference", "cpu", torch.float32)[1]
    got, expected = (
        run(launches, name, made, torch.float32, torch.float32)
        for launches in (kernels("activation"), reference)
    )
    torch.testing.assert_close(got, expected, equal_nan=True)
    # Everything is dropped, infinities too.
    made = numbers(name, **given | {"dropout_p": 1.0, "saved": torch.zeros(1, 8)})
    for value in run(kernels("activation"), name, made, torch.float32, torch.float32).values():
        assert not value.any()
