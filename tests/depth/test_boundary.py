"""A push that does everything between two layers in one pass."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend
from deepfast.depth.push import OutNorm
from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import Stack, leaf

LAYERS, DIM = 6, 67


@pytest.fixture(params=["cpu", "reference", "cuda"])
def kernel_backend(request):
    """Each backend that can run here, by name."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def norm_of(kind, dtype):
    """The norm of the result: None, an RMS norm, which has no bias, or a layer norm, "bare" without
    weight and bias."""
    if kind is None:
        return None
    weight, bias = leaf(DIM, dtype=dtype), leaf(DIM, dtype=dtype)
    bias = bias if kind == "layer" else None
    return OutNorm(None if kind == "bare" else weight, bias, 1e-5, rms=kind == "rms")


def chain(stack, history, y, *, dropout_p, residual, out_norm, return_x):
    """A sum over what all pushes return."""
    total, rest = 0.0, None
    for k in range(LAYERS + 1):
        x = stack.push(
            y, history, residual=rest, dropout_p=dropout_p if k else 0.0, seed=11 * k,
            out_norm=out_norm, return_x=return_x,
        )  # fmt: skip
        x, n = x if out_norm else (x, x)
        assert (x is None) != return_x
        total = total + n + (0.5 * x if return_x else 0)
        y, rest = torch.tanh(n), n if residual else None
    return total


@pytest.mark.only_if(lambda kernel_backend, name: kernel_backend != "cuda" or name == "dlcl")
@pytest.mark.parametrize(
    ("out_norm", "return_x"),
    [
        ("layer", True), ("layer", False), ("no bias", True), ("bare", False), ("rms", True),
        ("rms", False), (None, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", ["dlcl", "attnres", "block_attnres"])
def test_equals_plain_torch(ran, kernel_backend, name, dropout_p, residual, out_norm, return_x):
    dtype = torch.float32 if kernel_backend == "cuda" else torch.float64
    stack = Stack(name, LAYERS, DIM, backend=kernel_backend).to(dtype)
    norm, y = norm_of(out_norm, dtype), leaf(70, DIM, dtype=dtype)
    options = {"dropout_p": dropout_p, "residual": residual, "return_x": return_x}
    leaves = [y, *stack.depth.parameters(), *(p for p in (norm or ())[:2] if p is not None)]
    found, dout = [], torch.randn_like(y)
    for history in (DepthHistory(block=2), stack.plain()):
        out = chain(stack, history, y, out_norm=norm, **options)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_gradients_of_two_leaves_share_no_memory(kernel_backend):
    dlcl = DLCL(1, 6, norm=None, backend=kernel_backend)
    f, r = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    for _ in range(2):
        dlcl(f, DepthHistory(), residual=r).sum().backward()
    assert f.grad.data_ptr() != r.grad.data_ptr()
    assert torch.equal(f.grad, torch.full((4, 6), 2.0))
    assert torch.equal(r.grad, torch.full((4, 6), 2.0))


def test_input_may_be_changed_in_place_after_the_push(kernel_backend):
    """States are copies, so the caller may overwrite what it pushed."""
    dlcl = DLCL(2, 6, norm=None, backend=kernel_backend)

    def run(change):
        y = torch.arange(24.0).view(4, 6).requires_grad_()
        history, a = DepthHistory(), y * 1
        x = dlcl(a, history)
        if change:
            a.mul_(3)
        return dlcl(torch.tanh(x), history)

    assert torch.equal(run(True), run(False))


def test_result_may_be_changed_in_place(kernel_backend):
    dlcl, history = DLCL(1, 6, norm=None, backend=kernel_backend), DepthHistory()
    y = torch.randn(4, 6, requires_grad=True)
    x = F.relu(dlcl(y, history), inplace=True)
    dlcl(x, history).sum().backward()
    assert y.grad is not None
