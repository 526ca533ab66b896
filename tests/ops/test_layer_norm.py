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


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 33)])
def test_no_tokens(backend, shape):
    x = torch.randn(shape, requires_grad=True)
    weight, bias = torch.randn(2, shape[-1]).requires_grad_().unbind()
    weight.retain_grad()
    y, s = layer_norm(
        x, weight, bias, residual=x, dropout_p=0.5, training=True, backend=backend
    )  # fmt: skip
    (y.sum() + s.sum()).backward()
    assert y.shape == s.shape == x.grad.shape == shape
    assert weight.grad.eq(0).all()


def views(t, d):
    """Tensors of equal values: contiguous, and with other strides but contiguous channels."""
    wide = torch.randn(t.shape[0], d + 9)
    wide[:, 4 : d + 4] = t
    yield wide[:, 4 : d + 4]
    every_other = torch.randn(2 * t.shape[0], d)
    every_other[::2] = t
    yield every_other[::2]
    yield t.view(3, -1, d).transpose(0, 1).contiguous().transpose(0, 1)
    yield t.t().contiguous().t()


def test_strides_change_nothing(backend):
    t, d = torch.randn(12, 19), 19
    weight, bias = torch.randn(2, d).unbind()
    expected = layer_norm(t, weight, bias, backend=backend)
    for view in views(t, d):
        x = view.detach().requires_grad_()
        y = layer_norm(x, weight, bias, backend=backend)
        assert torch.equal(y.reshape(12, d), expected)
        dy = torch.randn(12, d)
        (dx,) = torch.autograd.grad(y, x, next(views(dy, d)).reshape(y.shape))
        x2 = t.clone().requires_grad_()
        (dx2,) = torch.autograd.grad(layer_norm(x2, weight, bias, backend=backend), x2, dy)
        assert torch.equal(dx.reshape(12, d), dx2)


def test_gradient_that_is_expanded(backend):
    x = torch.randn(6, 11, requires_grad=True)
    y = layer_norm(x, None, None, backend=backend)
    (expected,) = torch.autograd.grad(y, x, torch.arange(11.0).repeat(6, 1))
    y = layer_norm(x, None, None, backend=backend)
    (got,) = torch.autograd.grad(y, x, torch.arange(11.0).expand(6, 11))
    assert torch.equal(got, expected)


def test_strided_input_is_not_copied(meter):
    x = torch.randn(200, 300)[:, 7:263]
    with meter() as m, torch.no_grad():
        y = layer_norm(x, None, None, backend="cpu")
    assert m.peak < y.nbytes * 1.1


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


@pytest.mark.parametrize("residual", [True, False])
def test_gradient_that_never_came(backend, residual):
    """An op behind may hand back no gradient at all: None, not zeros."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(4, 6, requires_grad=True)
    y = layer_norm(x, None, None, residual=x if residual else None, backend=backend)
    Silent.apply(y[0] if residual else y).sum().backward()
    assert x.grad is None or x.grad.eq(0).all()


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


@pytest.mark.parametrize("trainable", ["x", "residual", "weight", "bias"])
def test_one_gradient_alone(backend, trainable):
    given = {"x": (5, 9), "residual": (5, 9), "weight": (9,), "bias": (9,)}
    tensors = {name: torch.randn(shape) for name, shape in given.items()}

    def run(names):
        leaves = {k: t.clone().requires_grad_(k in names) for k, t in tensors.items()}
        y, s = layer_norm(
            leaves["x"], leaves["weight"], leaves["bias"], residual=leaves["residual"],
            dropout_p=0.5, training=True, seed=1, backend=backend,
        )  # fmt: skip
        (y.square().sum() + s.sum()).backward()
        return leaves

    alone, everything = run({trainable}), run(set(given))
    assert torch.equal(alone[trainable].grad, everything[trainable].grad)
    assert all(alone[name].grad is None for name in given if name != trainable)


def test_bit_identical_on_any_number_of_threads(threads):
    x, r = torch.randn(2, 333, 67).unbind()
    w, b = torch.randn(2, 67).unbind()

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
        y, s = layer_norm(
            leaves[0], leaves[2], leaves[3], residual=leaves[1], dropout_p=0.2, training=True,
            seed=9, backend="cpu",
        )  # fmt: skip
        (y.square().sum() + s.sum()).backward()
        return [y, s, *(t.grad for t in leaves)]

    with threads(1):
        one = run()
    for n in (2, 2, 3):
        with threads(n):
            assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))


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


def test_second_backward_with_retain_graph(backend):
    x = torch.randn(4, 6, requires_grad=True)
    y = layer_norm(x, None, None, backend=backend).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


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
        ({"backend": "cud"}, BackendError, "expected one of cuda, triton, .*, cpu, reference"),
        ({"backend": [1]}, BackendError, r"layer_norm: backend: expected one of .*got \[1\]"),
    ],
)
def test_refuses(change, error, message):
    args = {"x": torch.ones(3, 4), "weight": torch.ones(4), "bias": torch.zeros(4)} | change
    with pytest.raises(error, match=message):
        layer_norm(**args)
