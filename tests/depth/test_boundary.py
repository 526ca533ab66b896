"""The boundary op: everything between two layers in one pass, as DLCL calls it."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend
from deepfast.depth.push import OutNorm
from deepfast.nn import DLCL, DepthHistory
from deepfast.reference.dropout import dropout_mask

P, LAYERS, BLOCK = 0.3, 6, 2
SEEDS = [11 * k for k in range(LAYERS + 1)]


@pytest.fixture(params=["cpu", "reference", "cuda"])
def kernel_backend(request):
    """Each backend that can run here, by name."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def norm_of(kind, weight, bias, eps):
    """The norm of the result: None, an RMS norm, which has no bias, or a layer-norm, "bare" without
    weight and bias."""
    if kind is None:
        return None
    weight = None if kind == "bare" else weight
    return OutNorm(weight, bias if kind == "layer" else None, eps, rms=kind == "rms")


def fused(dlcl, y, leaves, *, p, residual, out_norm, return_x):
    """A pre-norm chain; each boundary does everything in one pass."""
    history, total = DepthHistory(block=BLOCK), 0.0
    branch, rest = y, None
    for k in range(LAYERS + 1):
        norm = norm_of(out_norm, leaves["out_weight"], leaves["out_bias"], 1e-5)
        x = dlcl(
            branch, history, residual=rest, dropout_p=p if k else 0.0, seed=SEEDS[k],
            out_norm=norm, return_x=return_x,
        )  # fmt: skip
        x, n = x if out_norm else (x, x)
        assert (x is None) == (norm is not None and not return_x)
        total = total + n + (0 if x is None else 0.5 * x)
        branch, rest = torch.tanh(n * leaves["scale"]), (n if residual else None)
    return total


def plain(dlcl, y, leaves, *, p, residual, out_norm, return_x):
    """The same in PyTorch's ops, in the dtype of y."""
    d = y.dtype
    w, gain, shift = (leaves[name].to(d) for name in ("weight", "norm_weight", "norm_bias"))
    w = w.tril()
    states, total, branch, rest = [], 0.0, y, None
    for k in range(LAYERS + 1):
        mask = dropout_mask(SEEDS[k], *branch.shape, p if k else 0.0).to(d)
        s = branch * mask + (0 if rest is None else rest)
        states.append(F.layer_norm(s, s.shape[-1:], gain[k], shift[k]) if k else s)
        x = (torch.stack(states) * w[k, : k + 1].view(-1, 1, 1)).sum(0)
        n = x
        if out_norm:
            out_weight, out_bias = leaves["out_weight"].to(d), leaves["out_bias"].to(d)
            if out_norm == "rms":
                n = F.rms_norm(x, x.shape[-1:], out_weight, 1e-5)
            else:
                norm = norm_of(out_norm, out_weight, out_bias, 1e-5)
                n = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
        total = total + n + (0.5 * x if return_x or not out_norm else 0)
        branch, rest = torch.tanh(n * leaves["scale"].to(d)), (n if residual else None)
    return total


def grads(form, dlcl, y, given, dout, dtype, parameter_dtype, **options):
    y = y.detach().clone().to(dtype).requires_grad_()
    leaves = {k: v.detach().clone().to(parameter_dtype).requires_grad_() for k, v in given.items()}
    if form is fused:
        dlcl.zero_grad()
        leaves |= dict(dlcl.named_parameters())
        leaves["scale"] = leaves["scale"].to(dtype)
        leaves["scale"].retain_grad()
    total = form(dlcl, y, leaves, **options)
    total.backward(dout.to(total.dtype))
    norm = norm_of(options["out_norm"], "out_weight", "out_bias", 0.0) or (None, None)
    used = [n for n in leaves if n in norm[:2] or n not in ("out_weight", "out_bias")]
    return {"out": total.detach(), "y": y.grad} | {n: leaves[n].grad for n in used}


def each_form(test):
    """Every set of operands and results that a boundary may have."""
    for names, values in (
        ("p", [0.0, P]),
        ("residual", [True, False]),
        (
            ("out_norm", "return_x"),
            [
                ("layer", True), ("layer", False), ("no bias", True), ("bare", False),
                ("rms", True), ("rms", False), (None, True),
            ],
        ),
    ):  # fmt: skip
        test = pytest.mark.parametrize(names, values)(test)
    return test


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@each_form
@pytest.mark.only_if(
    lambda kernel_backend, dtype: kernel_backend != "cuda" or dtype != torch.float64
)
def test_agrees(tolerances, ran, kernel_backend, dtype, p, residual, out_norm, return_x):
    dim = 67
    dlcl = DLCL(LAYERS, dim, backend=kernel_backend)
    with torch.no_grad():
        for q in dlcl.parameters():
            q.add_(0.1 * torch.randn_like(q))
    given = {name: 1 + 0.1 * torch.randn(dim) for name in ("out_weight", "out_bias", "scale")}
    given["scale"] = given["scale"].to(dtype).float()
    given |= {name: q.detach() for name, q in dlcl.named_parameters()}
    y, dout = torch.randn(2, 70, dim).to(dtype).unbind()
    options = {"p": p, "residual": residual, "out_norm": out_norm, "return_x": return_x}
    own = torch.float64 if dtype == torch.float64 else torch.float32
    with ran("boundary", kernel_backend):
        got = grads(fused, dlcl.to(own), y, given, dout, dtype, own, **options)
    low = tolerances.plain_dtype(dtype)
    in_dtype = grads(plain, dlcl, y, given, dout, low, low, **options)
    exact = grads(plain, dlcl, y, given, dout, torch.float64, torch.float64, **options)
    tolerances.assert_all_accurate(got, in_dtype, exact, dtype)


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
