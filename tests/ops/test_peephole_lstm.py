"""deepfast.ops.peephole_lstm against float64, on every backend that computes it quickly."""

import pytest
import torch

from deepfast import backend as backends
from deepfast.ops import peephole_lstm
from deepfast.reference.peephole_lstm import cell
from deepfast.reference.peephole_lstm import peephole_lstm as reference

# Channels: less than a vector, several kinds of tail, whole panels. Sentences: less than a block of
# rows. Depth: more than a block.
SHAPES = [(1, 1, 1), (4, 7, 17), (3, 13, 64), (2, 3, 100), (5, 4, 8)]
NAMES = ("f", "weight", "peephole", "h0", "c0")
OUTPUTS = ("h", "h_last", "c_last")


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    """It has no CUDA kernels; Triton's are tested in tests/kernels."""
    reason = backends.refusal("peephole_lstm", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def operands(T, B, H, dtype=torch.float32):
    shapes = (T, B, 4 * H), (H, 4 * H), (3, H), (B, H), (B, H)
    scales = 2, H**-0.5, 1, 1, 1
    return [(s * torch.randn(shape)).to(dtype) for s, shape in zip(scales, shapes, strict=True)]


def gradients_of(T, B, H):
    return [torch.randn(T, B, H), torch.randn(B, H), torch.randn(B, H)]


def some_lengths(T, B):
    return (torch.arange(B) * 7 + T) % (T + 1)


def plain(f, weight, peephole, h0, c0, *, lengths, reverse):
    """Torch's own ops in the operands' dtype, sentence by sentence."""
    batch = f.shape[1]
    lasts, columns = [], []
    for b in range(batch):
        n = f.shape[0] if lengths is None else int(lengths[b])
        h, c, out = h0[b : b + 1], c0[b : b + 1], [torch.zeros_like(h0[0])] * f.shape[0]
        for t in reversed(range(n)) if reverse else range(n):
            h, c, _ = cell(f[t, b : b + 1] + h @ weight, c, peephole)
            out[t] = h[0]
        columns.append(torch.stack(out))
        lasts.append((h[0], c[0]))
    return torch.stack(columns, 1), *(torch.stack(x) for x in zip(*lasts, strict=True))


def step(form, leaves, grads, **options):
    """Outputs and gradients by name."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    f, weight, peephole, h0, c0 = leaves
    out = form(f, weight, peephole, h0=h0, c0=c0, **options)
    loss = sum((o * g.to(o.dtype)).sum() for o, g in zip(out, grads, strict=True))
    found = dict(zip(OUTPUTS, (o.detach() for o in out), strict=True))
    return found | dict(zip(NAMES, torch.autograd.grad(loss, leaves), strict=True))


def fused(backend):
    return lambda *args, **options: peephole_lstm(*args, backend=backend, **options)


def positional(f, weight, peephole, *, h0, c0, **options):
    return plain(f, weight, peephole, h0, c0, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("T", "B", "H"), SHAPES)
def test_agrees(tolerances, ran, backend, T, B, H, reverse, dtype):
    leaves, grads = operands(T, B, H, dtype), gradients_of(T, B, H)
    options = {"lengths": some_lengths(T, B), "reverse": reverse}
    with ran("peephole_lstm", backend):
        got = step(fused(backend), leaves, grads, **options)
    wide = [x.double() for x in leaves]
    exact = step(reference, wide, [g.to(dtype).double() for g in grads], **options)
    near = [x.to(tolerances.plain_dtype(dtype)) for x in leaves]
    tolerances.assert_all_accurate(got, step(positional, near, grads, **options), exact, dtype)
    assert got["h"].dtype == got["h_last"].dtype == dtype
    assert got["c_last"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    behind = torch.arange(T)[:, None] >= options["lengths"]
    assert got["h"][behind].eq(0).all()
    assert got["f"][behind].eq(0).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_the_reference_is_the_formula(reverse):
    """A padded batch gives the same as its sentences one by one."""
    leaves, grads = operands(4, 5, 3, torch.float64), gradients_of(4, 5, 3)
    options = {"lengths": some_lengths(4, 5), "reverse": reverse}
    want, got = (step(form, leaves, grads, **options) for form in (positional, reference))
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=name)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck(backend, reverse):
    leaves = [x.requires_grad_() for x in operands(3, 4, 2, torch.float64)]
    lengths = torch.tensor([3, 0, 2, 1])

    def run(f, weight, peephole, h0, c0):
        return peephole_lstm(
            f, weight, peephole, h0=h0, c0=c0, lengths=lengths, reverse=reverse, backend=backend
        )

    assert torch.autograd.gradcheck(run, leaves)


def test_no_states_are_zeros_and_no_lengths_the_longest(backend):
    T, B, H = 3, 5, 6
    f, weight, peephole, *_ = operands(T, B, H)
    bare = peephole_lstm(f, weight, peephole, backend=backend)
    zeros = torch.zeros(B, H)
    full = peephole_lstm(
        f, weight, peephole, h0=zeros, c0=zeros, lengths=torch.full((B,), T), backend=backend
    )
    assert all(torch.equal(a, b) for a, b in zip(bare, full, strict=True))


@pytest.mark.parametrize("only", range(3))
def test_a_loss_on_one_output(backend, only):
    leaves, grads = operands(3, 5, 6), gradients_of(3, 5, 6)
    alone = [g if i == only else torch.zeros_like(g) for i, g in enumerate(grads)]
    want = step(fused(backend), leaves, alone)
    leaves = [x.requires_grad_() for x in leaves]
    f, weight, peephole, h0, c0 = leaves
    out = peephole_lstm(f, weight, peephole, h0=h0, c0=c0, backend=backend)[only]
    found = torch.autograd.grad(out, leaves, grads[only])
    for name, grad in zip(NAMES, found, strict=True):
        torch.testing.assert_close(grad, want[name], msg=name)


def test_steps_one_by_one_are_the_whole(backend):
    """The caller carries the state, like a decoder."""
    f, weight, peephole, h, c = operands(5, 3, 9)
    whole = peephole_lstm(f, weight, peephole, h0=h, c0=c, backend=backend)
    for t in range(5):
        out, h, c = peephole_lstm(f[t : t + 1], weight, peephole, h0=h, c0=c, backend=backend)
        assert torch.equal(out[0], whole[0][t])
    assert torch.equal(h, whole[1])
    assert torch.equal(c, whole[2])


def test_any_number_of_threads_gives_the_same_bits(threads):
    leaves, grads = operands(3, 23, 33), gradients_of(3, 23, 33)
    options = {"lengths": some_lengths(3, 23), "reverse": True}
    first = step(fused("cpu"), leaves, grads, **options)
    for count in (1, 2, 5):
        with threads(count):
            again = step(fused("cpu"), leaves, grads, **options)
        # The weight's gradient is torch's product.
        assert all(torch.equal(first[n], again[n]) for n in first if n != "weight")


def test_extreme_values(backend):
    """Gates that are exactly 0 or 1, and a NaN that stays in its sentence."""
    f = torch.zeros(2, 4, 12)
    f[:, 0], f[:, 1], f[0, 2, 0] = 1e30, -1e30, torch.nan
    weight, peephole = torch.eye(3).repeat(1, 4), torch.ones(3, 3)
    h, _, c = peephole_lstm(f, weight, peephole, backend=backend)
    assert torch.equal(c[0], torch.full((3,), 2.0))
    assert h[:, 1].eq(0).all()
    assert h[:, 2, 0].isnan().all()
    assert h[:, 3].eq(0).all()


def test_tiny_values_keep_their_digits(backend):
    """tanh(x) is x for tiny x."""
    f = torch.zeros(1, 1, 4 * 16)
    f[..., :16] = torch.logspace(-30, -2, 16)
    h, _, c = peephole_lstm(f, torch.zeros(16, 64), torch.zeros(3, 16), backend=backend)
    exact = f[0, 0, :16].double().tanh() / 2
    torch.testing.assert_close(c[0].double(), exact, rtol=3e-7, atol=0)
    torch.testing.assert_close(h[0, 0].double(), exact.tanh() / 2, rtol=6e-7, atol=0)


@pytest.mark.parametrize(("T", "B"), [(0, 3), (2, 0), (0, 0)])
def test_empty(backend, T, B):
    leaves = [x.requires_grad_() for x in operands(T, B, 5)]
    f, weight, peephole, h0, c0 = leaves
    out = peephole_lstm(f, weight, peephole, h0=h0, c0=c0, reverse=True, backend=backend)
    assert out[0].shape == (T, B, 5)
    assert torch.equal(out[1], h0)
    grads = torch.autograd.grad(sum(o.sum() for o in out), leaves)
    assert grads[1].eq(0).all()
    assert grads[2].eq(0).all()
    assert grads[3].eq(1).all()
    # The same without first states.
    out = peephole_lstm(f, weight, peephole, reverse=True, backend=backend)
    grads = torch.autograd.grad(sum(o.sum() for o in out), leaves[:3])
    assert [g.shape for g in grads] == [x.shape for x in leaves[:3]]
    assert all(g.eq(0).all() for g in grads)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"f": 3}, TypeError, "f must be a tensor, got int"),
        ({"f": torch.ones(2, 8)}, ValueError, r"f must be \(T, B, 4H\), got \(2, 8\)"),
        ({"f": torch.ones(2, 3, 9)}, ValueError, r"f must be \(T, B, 4H\), got \(2, 3, 9\)"),
        ({"weight": torch.ones(2, 4)}, ValueError, r"weight must be \(2, 8\), got \(2, 4\)"),
        ({"weight": torch.ones(2, 8).half()}, ValueError, "weight must have f's dtype"),
        ({"peephole": torch.ones(2)}, ValueError, r"peephole must be \(3, 2\), got \(2,\)"),
        ({"h0": torch.ones(2, 2)}, ValueError, r"h0 must be \(3, 2\), got \(2, 2\)"),
        ({"c0": torch.ones(3)}, ValueError, r"c0 must be \(3, 2\), got \(3,\)"),
        ({"lengths": torch.ones(3)}, ValueError, "lengths must be int64, got torch.float32"),
        ({"lengths": torch.tensor([1, 3, 0])}, ValueError, "lengths must be from 0 to 2, got 0 to"),
        ({"lengths": torch.tensor([1, -1, 0])}, ValueError, "from 0 to 2, got -1 to 1"),
    ],
)
def test_bad_operands_are_one_sentence(change, error, message):
    given = {"f": torch.ones(2, 3, 8), "weight": torch.ones(2, 8), "peephole": torch.ones(3, 2)}
    given |= change
    with pytest.raises(error, match=f"peephole_lstm: .*{message}"):
        peephole_lstm(given.pop("f"), given.pop("weight"), given.pop("peephole"), **given)
