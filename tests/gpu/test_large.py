"""More than 2^31 elements, which an int32 does not count."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases.sentences import offsets
from deepfast.ops.common import empty_slots

pytestmark = pytest.mark.gpu

REAL = torch.cuda.is_available()
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16


@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_activation(room, device, kind):
    room(14)
    T, F = (524_800, 4096) if REAL else (96, 8)
    h = torch.empty(T, F, dtype=torch.bfloat16, device=device).normal_()
    out = ops.activation(h, kind, backend="triton")
    # Elements are independent, so the last rows and those around element 2^31 are enough.
    around = min(2**31 // F, T - 40)
    for rows in (slice(T - 32, T), slice(around - 8, around + 8)):
        assert torch.equal(out[rows], ops.activation(h[rows].clone(), kind, backend="triton"))


def test_layer_norm(by, tolerances, room, device):
    room(36)
    T, D = (524_800, 4096) if REAL else (96, 8)
    x, residual, dy, ds = (
        torch.empty(T, D, dtype=torch.bfloat16, device=device).normal_() for _ in range(4)
    )
    x.requires_grad_(), residual.requires_grad_()
    w, b = (torch.randn(D, device=device, requires_grad=True) for _ in range(2))
    y, s = ops.add_layer_norm(x, residual, w, b, backend=by)
    dx, dw, db = torch.autograd.grad((y, s), (x, w, b), (dy, ds))
    # Rows are independent, so the last ones and those around element 2^31 are enough.
    around = min(2**31 // D, T - 40)
    for rows in (slice(T - 32, T), slice(around - 8, around + 8)):

        def run(dtype, rows=rows):
            part = (x[rows].to(dtype) + residual[rows].to(dtype)).detach()
            # The sum as it was stored.
            part = s[rows].detach().to(dtype) if dtype == torch.float64 else part
            part.requires_grad_()
            norm = [p.detach().to(dtype) for p in (w, b)]
            out = F.layer_norm(part, (D,), *norm)
            (grad,) = torch.autograd.grad(out, part, dy[rows].to(dtype))
            return {"y": out.detach().cpu(), "dx": (grad + ds[rows].to(dtype)).cpu()}

        got = {"y": y[rows].detach().cpu(), "dx": dx[rows].cpu()}
        tolerances.assert_all_accurate(got, run(torch.bfloat16), run(torch.float64), torch.bfloat16)
    # Sums over all rows, each counted once.
    plain, exact = (dy.sum(0, dtype=kind).cpu() for kind in (torch.float32, torch.float64))
    tolerances.assert_accurate(db.cpu(), plain, exact, torch.float32, "dbias")
    assert torch.isfinite(dw).all()


def test_attention(room, device):
    """The last sentences of a long projection have the same bits as on their own."""
    room(24)
    sentences, n, heads, width = (22_000, 64, 8, 64) if device == "cuda" else (5, 4, 2, 16)
    qkv = torch.empty(sentences * n, 3, heads, width, dtype=HALF, device=device).normal_()
    if device == "cuda":
        assert qkv.numel() > 2**31
    do = torch.empty(sentences * n, heads, width, dtype=HALF, device=device).normal_()

    def run(x, g):
        x = x.detach().requires_grad_()
        cu = offsets([n] * (len(x) // n), device)
        o = ops.attention(
            *x.unbind(1), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n,
            backend="triton",
        )  # fmt: skip
        return o.detach(), *torch.autograd.grad(o, x, g)

    tail = slice(-3 * n, None)
    whole, part = run(qkv, do), run(qkv[tail].clone(), do[tail].clone())
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[tail], b)


def test_cross_entropy(tolerances, room, device):
    """One launch over more logits than an int32 counts."""
    room(8)
    T, V = (24_576, 100_000) if REAL else (6, 40)
    x = torch.empty(T, V, dtype=torch.bfloat16, device=device).normal_()
    rows = slice(T - 3, T)
    exact = x[rows].double().cpu().requires_grad_()
    target = torch.randint(V, (T,), device=device)
    losses = torch.empty(2, T, device=device)
    _, launch = backend.choose("linear_cross_entropy", "triton", x.device.type, x.dtype)
    launch.cross_entropy(
        logits=x, target=target, label_smoothing=0.0, ignore_index=-100, write_grad=True,
        loss=losses[0], nll=losses[1],
    )  # fmt: skip
    expected = F.cross_entropy(exact, target[rows].cpu(), reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), exact)
    expected = expected.detach()
    plain = expected.float()
    tolerances.assert_accurate(losses[0, rows].cpu(), plain, expected, torch.float32, "loss")
    tolerances.assert_accurate(x[rows].cpu(), grad.bfloat16(), grad, torch.bfloat16, "dlogits")


def test_boundary(by, tolerances, room, device):
    """One state of more than 2^31 elements; its last tokens against float64."""
    room(46)
    (T, D), dtype = (524_800, 4096) if REAL else (12, 16), torch.bfloat16
    like = torch.empty(T, D, dtype=dtype, device=device)
    states = empty_slots(3, like).normal_()
    branch, residual, dx = (torch.empty_like(like).normal_() for _ in range(3))
    x, dbranch = torch.empty_like(like), torch.empty_like(like)
    weight = torch.tensor([[1.0, 0.0], [0.5, -0.75]], device=device)
    dweight = torch.zeros_like(weight)
    _, launch = backend.choose("boundary", by, torch.device(device).type, dtype)
    launch.boundary_forward(
        branch=branch, residual=residual, dropout_p=0.0, states=states, k=1, near=[0, 1],
        weight=weight, norm_source=False, source_eps=1e-5, source_rms=False, out_eps=0.0,
        out_rms=False, x=x,
    )  # fmt: skip
    tail = slice(T - 9, T)
    y = branch[tail].cpu().double() + residual[tail].cpu().double()
    tolerances.assert_accurate(states[1][tail].cpu(), y.to(dtype), y, dtype, "state")
    # The mix reads the state as it is stored.
    expected = 0.5 * states[0][tail].cpu().double() - 0.75 * states[1][tail].cpu().double()
    tolerances.assert_accurate(x[tail].cpu(), expected.to(dtype), expected, dtype, "x")
    y_before = states[1].clone()
    launch.boundary_backward(
        states=states, k=1, near=[0, 1], weight=weight, norm_source=False, source_rms=False,
        out_rms=False, dropout_p=0.0, dx=dx, grads=states, grad_slot=2, pull_rows=[1],
        pull_slots=[2], dbranch=dbranch, dweight=dweight,
    )  # fmt: skip
    assert torch.equal(states[2][tail], dx[tail])
    expected = -0.75 * dx[tail].cpu().double()
    tolerances.assert_accurate(dbranch[tail].cpu(), expected.to(dtype), expected, dtype, "dbranch")
    parts = [t.flatten().split(1 << 26) for t in (dx, y_before)]
    exact = sum((a.double() @ b.double()).cpu() for a, b in zip(*parts, strict=True))
    plain = sum((a.float() @ b.float()).cpu() for a, b in zip(*parts, strict=True))
    tolerances.assert_accurate(dweight[1, 1].cpu(), plain, exact, torch.float32, "dweight")


def test_mix_rows(by, tolerances, room, device):
    """Slots further apart than an int32 can count; some tokens are checked in float64."""
    room(10)
    SLOTS, T, D = (80, 65_536, 512) if REAL else (6, 4, 16)
    dtype = torch.bfloat16
    like = torch.empty(T, D, dtype=dtype, device=device)
    states = empty_slots(SLOTS, like).normal_()
    weight = torch.randn(SLOTS, SLOTS, device=device) / SLOTS
    _, launch = backend.choose("boundary", by, torch.device(device).type, dtype)
    sources, rows = list(range(SLOTS - 2)), [SLOTS - 2, SLOTS - 1]
    tokens = slice(T - 3, T)

    def exact(w, picked):
        return torch.einsum("rk,ktd->rtd", w.double().cpu(), picked[:, tokens].double().cpu())

    out = empty_slots(2, like)
    launch.mix_rows(
        states=states, sources=sources, weight=weight, rows=rows, out=out, out_rows=[0, 1],
        accumulate=False,
    )  # fmt: skip
    expected = exact(weight[rows][:, sources], states[: SLOTS - 2])
    plain = expected.to(dtype)
    tolerances.assert_accurate(out[:, tokens].cpu(), plain, expected, dtype, "mix_rows")

    dweight = torch.zeros_like(weight)
    later = list(range(2, SLOTS))
    launch.pull_rows(
        grads=states, grad_slots=later, rows=later, states=states, sources=[0, 1], weight=weight,
        out=out, out_rows=[0, 1], accumulate=False, dweight=dweight,
    )  # fmt: skip
    expected = exact(weight[later][:, [0, 1]].T, states[2:])
    plain = expected.to(dtype)
    tolerances.assert_accurate(out[:, tokens].cpu(), plain, expected, dtype, "pull_rows")
    last, first = states[SLOTS - 1].flatten(), states[1].flatten()
    expected = sum(
        (a.double() @ b.double()).cpu()
        for a, b in zip(last.split(1 << 24), first.split(1 << 24), strict=True)
    )
    plain = (last.float() * first.float()).sum().cpu()
    # Like the plain form, it multiplies rounded states and adds in fp32.
    tolerances.assert_accurate(
        dweight[SLOTS - 1, 1].cpu(), plain, expected.double(), torch.bfloat16, "dweight"
    )
