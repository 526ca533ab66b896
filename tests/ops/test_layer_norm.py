"""deepfast.ops.layer_norm against float64, on every backend."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import BackendError
from deepfast.ops import layer_norm
from deepfast.reference.dropout import dropout_mask

LOW = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 17), (2, 3, 33), (150, 64), (7, 255), (2, 8192)]
SEED, P = 1234567890123, 0.3


def plain_form(x, residual, weight, bias, p, dtype):
    """The same in PyTorch's own ops, all in ``dtype``."""
    s = x.to(dtype)
    if p:
        rows = s.numel() // s.shape[-1]
        s = s * dropout_mask(SEED, rows, s.shape[-1], p).view(s.shape).to(dtype)
    s = s if residual is None else s + residual.to(dtype)
    w, b = (None if q is None else q.to(dtype) for q in (weight, bias))
    return F.layer_norm(s, s.shape[-1:], w, b), s


def grads_of(form, x, residual, weight, bias, dtype, dy, ds):
    """Outputs and all gradients by name."""
    leaves = {"dx": x, "dresidual": residual, "dweight": weight, "dbias": bias}
    leaves = {
        name: None if t is None else t.detach().clone().requires_grad_()
        for name, t in leaves.items()
    }
    y, s = form(*leaves.values())
    outputs, grads = ([y], [dy.to(y.dtype)]) if residual is None else ([y, s], [dy, ds])
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    result = {"y": y.detach()} | ({} if residual is None else {"s": s.detach()})
    return result | {name: t.grad for name, t in leaves.items() if t is not None}


def compare(tolerances, ran, backend, dtype, x, residual, weight, bias, p):
    x, residual = (None if t is None else t.to(dtype) for t in (x, residual))
    dy, ds = torch.randn(x.shape).to(dtype), torch.randn(x.shape).to(dtype)

    def fused(x, residual, weight, bias):
        y = layer_norm(
            x, weight, bias, residual=residual, dropout_p=p, training=True, seed=SEED,
            backend=backend,
        )  # fmt: skip
        return y if residual is not None else (y, None)

    with ran("layer_norm", backend):
        got = grads_of(fused, x, residual, weight, bias, dtype, dy, ds)

    def in_dtype(d):
        args = (None if t is None else t.to(d) for t in (x, residual, weight, bias))
        return grads_of(lambda *a: plain_form(*a, p, d), *args, d, dy, ds)

    tolerances.assert_all_accurate(got, in_dtype(dtype), in_dtype(torch.float64), dtype)
    assert got["y"].dtype == got["dx"].dtype == dtype
    for name in ("dweight", "dbias"):
        assert name not in got or got[name].dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", ["alone", "residual", "dropout", "both"])
def test_agrees(tolerances, ran, backend, dtype, shape, before):
    x = torch.randn(shape) * 2 + 0.5
    residual = torch.randn(shape) if before in ("residual", "both") else None
    weight, bias = torch.randn(2, shape[-1]).unbind()
    p = P if before in ("dropout", "both") else 0.0
    compare(tolerances, ran, backend, dtype, x, residual, weight, bias, p)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_agrees_without_gain_or_shift(tolerances, ran, backend, weight, bias):
    x = torch.randn(70, 37)
    w, b = torch.randn(2, 37).unbind()
    compare(
        tolerances, ran, backend, torch.float32, x, x.flip(0), w if weight else None,
        b if bias else None, P,
    )  # fmt: skip


EXTREMES = {
    "large mean": lambda n: n * 0.05 + 1000,
    "large mean, small variance": lambda n: n * 0.01 + 1e4,
    "huge": lambda n: n * 1e15,
    "tiny": lambda n: n * 1e-15,
    "constant rows": lambda n: n[:, :1].expand_as(n) * 100,
    "zero": lambda n: n * 0,
    "one outlier": lambda n: n + 1e4 * (torch.arange(n.shape[1]) == 3),
}


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dim", [5, 64, 500, 8191])
def test_agrees_on_extreme_values(tolerances, ran, backend, kind, dim):
    x = EXTREMES[kind](torch.randn(9, dim))
    weight, bias = torch.randn(2, dim).unbind()
    compare(tolerances, ran, backend, torch.float32, x, None, weight, bias, 0.0)


@pytest.mark.parametrize("kind", ["large mean", "constant rows", "zero", "one outlier"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_agrees_on_extreme_values_in_16_bits(tolerances, ran, backend, kind, dtype):
    x = EXTREMES[kind](torch.randn(9, 130))
    weight, bias = torch.randn(2, 130).unbind()
    compare(tolerances, ran, backend, dtype, x, None, weight, bias, 0.0)


def test_strided_input_is_not_copied(meter):
    x = torch.randn(200, 300)[:, 7:263]
    with meter() as m, torch.no_grad():
        y = layer_norm(x, None, None, backend="cpu")
    assert m.peak < y.nbytes * 1.1


@pytest.mark.parametrize("dim", [1024, 1021])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_result_has_the_values_of_its_parts(dtype, dim):
    # Results of 8 MiB are stored past the caches. 1021 channels leave most rows without alignment.
    tokens = 8 * 2**20 // (1021 * dtype.itemsize) + 2
    x, dy = torch.randn(2, tokens, dim).to(dtype).unbind()
    weight, bias = torch.randn(2, dim).unbind()

    def both_ways(x, dy):
        x = x.detach().requires_grad_()
        y = layer_norm(x, weight, bias, backend="cpu")
        return y.detach(), *torch.autograd.grad(y, x, dy)

    parts = [both_ways(*part) for part in zip(x.split(600), dy.split(600), strict=True)]
    for large, *small in zip(both_ways(x, dy), *parts, strict=True):
        assert torch.equal(large, torch.cat(small))


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(exact_backend, p, residual, weight, bias):
    def leaf(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    x, w, b = leaf(3, 5), leaf(5), leaf(5)
    r = leaf(3, 5) if residual else None

    def f(x, *rest):
        rest = list(rest)
        w_ = rest.pop(0) if weight else None
        b_ = rest.pop(0) if bias else None
        r_ = rest.pop(0) if residual else None
        return layer_norm(
            x, w_, b_, residual=r_, dropout_p=p, training=True, seed=5, backend=exact_backend
        )

    used = [t for t, want in ((w, weight), (b, bias), (r, residual)) if want]
    assert torch.autograd.gradcheck(f, (x, *used), check_undefined_grad=False)


@pytest.mark.parametrize("which", ["y", "s"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradient_through_one_output(exact_backend, which, p):
    x, r, w = (torch.randn(s, dtype=torch.float64, requires_grad=True)
               for s in ((4, 6), (4, 6), (6,)))  # fmt: skip

    def outputs():
        return layer_norm(
            x, w, None, residual=r, dropout_p=p, training=True, seed=3, backend=exact_backend
        )

    mask = dropout_mask(3, 4, 6, p)
    s = r + x * mask
    expected = (F.layer_norm(s, (6,), w), s)["ys".index(which)]
    dy = torch.randn(4, 6, dtype=torch.float64)
    leaves = (x, r, w) if which == "y" else (x, r)
    got = torch.autograd.grad(outputs()["ys".index(which)], leaves, dy)
    want = torch.autograd.grad(expected, leaves, dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# ---- how it behaves in a training loop ---------------------------------------------------------


def test_gradients_of_two_leaves_share_no_memory(backend):
    x, r = torch.randn(2, 4, 6).unbind()
    x, r = x.clone().requires_grad_(), r.clone().requires_grad_()
    for _ in range(2):
        y, s = layer_norm(x, None, None, residual=r, backend=backend)
        (y * torch.arange(6.0) + s).sum().backward()
    assert x.grad.data_ptr() != r.grad.data_ptr()
    once = torch.autograd.grad(
        (F.layer_norm(x + r, (6,)) * torch.arange(6.0) + x + r).sum(), (x, r)
    )
    torch.testing.assert_close(x.grad, 2 * once[0])
    torch.testing.assert_close(r.grad, 2 * once[1])


def test_result_may_be_changed_in_place(backend):
    x = torch.randn(4, 6, requires_grad=True)
    y = F.relu(layer_norm(x, None, None, backend=backend), inplace=True)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(F.relu(F.layer_norm(x, (6,))).square().sum(), x)
    torch.testing.assert_close(got, want)


def test_input_changed_in_place_before_backward_is_an_error(backend):
    x = torch.randn(4, 6, requires_grad=True)
    a = x * 1
    y = layer_norm(a, None, None, backend=backend)
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must be \(..., D\)"),
        ({"x": torch.ones(3, 0)}, ValueError, r"got \(3, 0\)"),
        ({"weight": torch.ones(5)}, ValueError, r"weight must be \(4,\), got \(5,\)"),
        ({"bias": torch.ones(1, 4)}, ValueError, r"bias must be \(4,\), got \(1, 4\)"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "weight must be on cpu, got meta"),
        ({"residual": torch.ones(2, 4)}, ValueError, r"shape \(3, 4\), got \(2, 4\)"),
        ({"residual": torch.ones(3, 4).half()}, ValueError, "dtype torch.float32, got"),
        ({"residual": torch.ones(3, 4, device="meta")}, ValueError, "device cpu, got meta"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be between 0 and 1"),
        ({"dropout_p": "a"}, ValueError, "layer_norm: dropout_p must be between 0 and 1, got 'a'"),
        ({"eps": float("nan")}, ValueError, "layer_norm: eps must be a number of .* 0, got nan"),
        ({"eps": -1}, ValueError, "eps must be a number of at least 0, got -1"),
        ({"eps": "a"}, ValueError, "eps must be a number of at least 0, got 'a'"),
        (
            {"dropout_p": 0.5, "training": True, "seed": 1.5},
            TypeError,
            "layer_norm: seed must be an int or a 0-dim int64 tensor on cpu, got 1.5",
        ),
        ({"x": torch.ones(3, 4).int()}, BackendError, "torch.int32"),
        ({"backend": "cuda"}, BackendError, "without CUDA|on cpu, not cuda"),
        ({"backend": "cud"}, BackendError, "expected one of cuda, triton, .*, sdpa, reference"),
        ({"backend": [1]}, BackendError, r"layer_norm: backend: expected one of .*got \[1\]"),
    ],
)
def test_refuses(change, error, message):
    args = {"x": torch.ones(3, 4), "weight": torch.ones(4), "bias": torch.zeros(4)} | change
    with pytest.raises(error, match=message):
        layer_norm(**args)
