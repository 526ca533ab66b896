"""More than 2^31 elements, which an int32 does not count."""

import pytest
import torch

from deepfast import backend, ops
from deepfast.cases.sentences import offsets
from deepfast.ops.common import empty_slots

REAL = torch.cuda.is_available()
# Side by side they would not fit the memory of a GPU, so that one process runs them all.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large"), *[pytest.mark.slow] * (not REAL)]
DTYPE = torch.bfloat16
T, D = (524_800, 4096) if REAL else (96, 16)


@pytest.fixture
def random(device):
    """Makes random bf16 tensors; skips the test where a GPU has less than ``gib`` GiB free."""

    def make(gib, *shapes, dtype=DTYPE):
        if REAL and (free := torch.cuda.mem_get_info()[0] / 2**30) < gib:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} GiB are free")
        return [torch.empty(s, dtype=dtype, device=device).normal_() for s in shapes]

    return make


def alike_alone(run, operands, group=1):
    """The last rows, and those around element 2^31, have the bits that they have alone: rows, or
    groups of them, are independent."""
    whole = run(*operands)
    width, count = operands[0][0].numel(), 8 * group
    middle = min(2**31 // width // group * group, len(operands[0]) - 2 * count)
    for start in (middle - group, len(operands[0]) - count):
        rows = slice(start, start + count)
        alone = run(*(x[rows].clone() for x in operands))
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[rows], b)


@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_activation(random, kind):
    alike_alone(lambda h: (ops.activation(h, kind, backend="triton"),), random(14, (T, D)))


def test_layer_norm(tolerances, random, device):
    w, b = (torch.randn(D, device=device, requires_grad=True) for _ in range(2))
    sums = []

    def run(x, residual, dy, ds):
        x.requires_grad_()
        y, s = ops.add_layer_norm(x, residual, w, b, backend="triton")
        dx, *of_rows = torch.autograd.grad((y, s), (x, w, b), (dy, ds))
        sums.append(of_rows)
        return y.detach(), s.detach(), dx

    operands = random(36, *[(T, D)] * 4)
    alike_alone(run, operands)
    dweight, dbias = sums[0]
    plain, exact = (operands[2].sum(0, dtype=kind).cpu() for kind in (torch.float32, torch.float64))
    tolerances.assert_accurate(dbias.cpu(), plain, exact, torch.float32, "dbias")
    assert torch.isfinite(dweight).all()


def test_attention(random, device):
    n, heads, width = (64, 8, 64) if REAL else (2, 2, 16)

    def run(x, g):
        x = x.detach().requires_grad_()
        cu = offsets([n] * (len(x) // n), device)
        o = ops.attention(
            *x.unbind(1), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n,
            backend="triton",
        )  # fmt: skip
        return o.detach(), *torch.autograd.grad(o, x, g)

    tokens = 22_000 * n if REAL else 48
    # The interpreter multiplies the bits of bf16 numbers as integers.
    half = DTYPE if REAL else torch.float16
    operands = random(24, (tokens, 3, heads, width), (tokens, heads, width), dtype=half)
    alike_alone(run, operands, group=n)


def test_cross_entropy(random, device):
    _, launch = backend.choose("linear_cross_entropy", "triton", device, DTYPE)
    T, V = (24_576, 100_000) if REAL else (64, 40)
    target = torch.randint(V, (T,), device=device)

    def run(logits, target):
        dlogits, losses = logits.clone(), torch.empty(2, len(logits), device=device)
        launch.cross_entropy(
            logits=dlogits, target=target, label_smoothing=0.0, ignore_index=-100,
            write_grad=True, loss=losses[0], nll=losses[1],
        )  # fmt: skip
        return dlogits, *losses

    alike_alone(run, [*random(14, (T, V)), target])


def test_boundary(by, tolerances, random, device):
    _, launch = backend.choose("boundary", by, device, DTYPE)
    weight = torch.tensor([[1.0, 0.0], [0.5, -0.75]], device=device)
    norms = {"norm_source": False, "source_rms": False, "out_rms": False}
    sums = []

    def run(branch, residual, older, dx):
        x, dbranch, dweight = torch.empty_like(dx), torch.empty_like(dx), torch.zeros_like(weight)
        states = empty_slots(3, dx)
        states[0] = older
        shared = {"states": states, "k": 1, "near": [0, 1], "weight": weight, "dropout_p": 0.0}
        launch.boundary_forward(
            **shared, **norms, branch=branch, residual=residual, source_eps=1e-5, out_eps=0.0, x=x
        )
        launch.boundary_backward(
            **shared, **norms, dx=dx, grads=states, grad_slot=2, pull_rows=[1], pull_slots=[2],
            dbranch=dbranch, dweight=dweight,
        )  # fmt: skip
        sums.append((dweight[1, 1].cpu(), states[1]))
        return states[1], x, states[2], dbranch

    operands = random(46, *[(T, D)] * 4)
    alike_alone(run, operands)
    dweight, state = sums[0]
    parts = [t.flatten().split(1 << 26) for t in (operands[-1], state)]
    exact = sum((a.double() @ b.double()).cpu() for a, b in zip(*parts, strict=True))
    plain = sum((a.float() @ b.float()).cpu() for a, b in zip(*parts, strict=True))
    tolerances.assert_accurate(dweight, plain, exact, torch.float32, "dweight")


def test_far_passes(tolerances, random, device):
    """Slots further apart than an int32 can count; some tokens are checked in float64."""
    count, T, D = (80, 65_536, 512) if REAL else (6, 4, 16)
    (like,) = random(10, (T, D))
    states, out = empty_slots(count, like).normal_(), empty_slots(2, like)
    weight = torch.randn(count, count, device=device) / count
    _, launch = backend.choose("boundary", "triton", device, DTYPE)
    tokens, rows, later = slice(T - 3, T), [count - 2, count - 1], [*range(2, count)]

    def check(name, w, picked):
        parts = w.double().cpu(), picked[:, tokens].double().cpu()
        exact = torch.einsum("rk,ktd->rtd", *parts)
        tolerances.assert_accurate(out[:, tokens].cpu(), exact.to(DTYPE), exact, DTYPE, name)

    shared = {"states": states, "weight": weight, "out": out, "out_rows": [0, 1]}
    launch.mix_rows(**shared, sources=[*range(count - 2)], rows=rows, accumulate=False)
    check("mix_rows", weight[rows][:, : count - 2], states[: count - 2])
    dweight = torch.zeros_like(weight)
    launch.pull_rows(
        **shared, grads=states, grad_slots=later, rows=later, sources=[0, 1], accumulate=False,
        dweight=dweight,
    )  # fmt: skip
    check("pull_rows", weight[later][:, [0, 1]].T, states[2:])
    last, first = states[count - 1].flatten(), states[1].flatten()
    parts = zip(last.split(1 << 24), first.split(1 << 24), strict=True)
    exact = sum((a.double() @ b.double()).cpu() for a, b in parts)
    plain = (last.float() * first.float()).sum().cpu()
    # Like the plain form, it multiplies rounded states and adds in fp32.
    tolerances.assert_accurate(dweight[count - 1, 1].cpu(), plain, exact, DTYPE, "dweight")
