"""deepfast.ops.rms_norm against float64 and torch's own, on every backend.

What it shares with `layer_norm`, whose registered op it is, is in test_layer_norm.py and in the
tests of all ops, for which cases.py has its cases.
"""

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import BackendError
from deepfast.ops import rms_norm
from deepfast.reference.dropout import dropout_mask

LOW = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 17), (2, 3, 33), (150, 64), (7, 255), (2, 8192)]
SEED, P = 1234567890123, 0.3


def plain_form(x, residual, weight, p):
    """The same in PyTorch's own ops."""
    if p:
        rows = x.numel() // x.shape[-1]
        x = x * dropout_mask(SEED, rows, x.shape[-1], p).view(x.shape).to(x.dtype)
    s = x if residual is None else x + residual
    return F.rms_norm(s, s.shape[-1:], weight, 1e-6), s


def grads_of(form, x, residual, weight, dy, ds):
    """Outputs and all gradients by name."""
    leaves = {"dx": x, "dresidual": residual, "dweight": weight}
    leaves = {n: None if t is None else t.clone().requires_grad_() for n, t in leaves.items()}
    y, s = form(*leaves.values())
    outputs, grads = ([y], [dy]) if residual is None else ([y, s], [dy, ds])
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    found = {"y": y.detach()} | ({} if residual is None else {"s": s.detach()})
    return found | {name: t.grad for name, t in leaves.items() if t is not None}


def compare(tolerances, ran, backend, dtype, x, residual, weight, p=0.0):
    x, residual = (None if t is None else t.to(dtype) for t in (x, residual))
    dy, ds = torch.randn(2, *x.shape).to(dtype)

    def fused(x, residual, weight):
        y = rms_norm(
            x, weight, residual=residual, dropout_p=p, training=True, seed=SEED, backend=backend
        )
        return y if residual is not None else (y, None)

    with ran("layer_norm", backend):
        got = grads_of(fused, x, residual, weight, dy, ds)

    def in_dtype(d):
        given = (None if t is None else t.to(d) for t in (x, residual, weight))
        return grads_of(lambda *a: plain_form(*a, p), *given, dy, ds)

    tolerances.assert_all_accurate(got, in_dtype(dtype), in_dtype(torch.float64), dtype)
    assert got["y"].dtype == got["dx"].dtype == dtype


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", ["alone", "residual", "dropout", "both"])
def test_agrees(tolerances, ran, backend, dtype, shape, before):
    residual = torch.randn(shape) if before in ("residual", "both") else None
    p = P if before in ("dropout", "both") else 0.0
    x, weight = torch.randn(shape) * 2 + 0.5, torch.randn(shape[-1])
    compare(tolerances, ran, backend, dtype, x, residual, weight, p)


def test_agrees_without_weight(tolerances, ran, backend):
    compare(tolerances, ran, backend, torch.float32, *torch.randn(2, 70, 37), None, P)


EXTREMES = {
    "large mean": lambda n: n * 0.05 + 1000,
    "huge": lambda n: n * 1e15,
    "tiny": lambda n: n * 1e-15,
    "zero": lambda n: n * 0,
    "one outlier": lambda n: n + 1e4 * (torch.arange(n.shape[1]) == 3),
}


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dim", [5, 64, 8191])
def test_agrees_on_extreme_values(tolerances, ran, backend, kind, dim):
    x, weight = EXTREMES[kind](torch.randn(9, dim)), torch.randn(dim)
    compare(tolerances, ran, backend, torch.float32, x, None, weight)


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_what_overflows_in_torch_overflows(backend, value):
    x = torch.ones(2, 9)
    x[0, 3] = value
    expected = F.rms_norm(x, (9,), None, 1e-6)
    torch.testing.assert_close(rms_norm(x, backend=backend), expected, equal_nan=True)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_gradcheck(exact_backend, p, residual, weight):
    def leaf(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    given = {"x": leaf(3, 5), "weight": leaf(5)}
    if residual:
        given["residual"] = leaf(3, 5)
    if not weight:
        del given["weight"]

    def f(*leaves):
        named = dict(zip(given, leaves, strict=True))
        return rms_norm(**named, dropout_p=p, training=True, seed=5, backend=exact_backend)

    assert torch.autograd.gradcheck(f, tuple(given.values()), check_undefined_grad=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "rms_norm: x must be a tensor, got list"),
        ({"weight": torch.ones(5)}, ValueError, r"rms_norm: weight must be \(4,\), got \(5,\)"),
        ({"residual": torch.ones(2, 4)}, ValueError, r"shape \(3, 4\), got \(2, 4\)"),
        ({"dropout_p": 1.5}, ValueError, "rms_norm: dropout_p must be between 0 and 1, got 1.5"),
        ({"eps": -1}, ValueError, "rms_norm: eps must be a number of at least 0, got -1"),
        ({"dropout_p": 0.5, "training": True, "seed": 1.5}, TypeError, "rms_norm: seed must be"),
        ({"x": torch.ones(3, 4).int()}, BackendError, "torch.int32"),
    ],
)
def test_refuses(change, error, message):
    args = {"x": torch.ones(3, 4), "weight": torch.ones(4)} | change
    with pytest.raises(error, match=message):
        rms_norm(**args)
