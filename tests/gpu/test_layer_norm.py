"""layer_norm and norm_linear on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import ops
from deepfast.reference.dropout import dropout, dropout_mask
from deepfast.reference.layer_norm import normalise

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if torch.cuda.is_available():
    SHAPES = [(8192, 512), (4096, 1024), (1024, 4096)]
    ODD = [(1023, 255), (257, 1000), (65, 8192), (3, 1), (0, 512)]
    REPEATED, LARGE = (8192, 512), (524_800, 4096)
else:
    SHAPES, ODD, REPEATED, LARGE = [(5, 32)], [(3, 17), (0, 16)], (5, 32), (96, 8)
SEED = torch.tensor(3 << 40)


def forward_arguments(twins, T, D, apart=0, rms=False):
    return {
        "x": twins.Stored(torch.randn(T, D), apart),
        "residual": twins.Stored(torch.randn(T, D), apart),
        "weight": twins.Computed(1 + 0.3 * torch.randn(D)),
        "bias": twins.Computed(torch.randn(D)),
        "eps": 1e-5, "rms": rms, "dropout_p": 0.3, "seed": SEED,
        "sum": twins.Result((T, D)), "y": twins.Result((T, D)),
        "mean": None if rms else twins.Result((T,), stored=False),
        "rstd": twins.Result((T,), stored=False),
    }  # fmt: skip


def backward_arguments(twins, T, D, dtype, apart=0, rms=False):
    s = torch.randn(T, D)
    _, mean, rstd = normalise(s.to(dtype).double(), 1e-5, rms)
    channels = {n: twins.Result((D,), stored=False) for n in ("dweight", "dbias")}
    return {
        "sum": twins.Stored(s, apart),
        "dy": twins.Stored(torch.randn(T, D), apart),
        "dsum": twins.Stored(torch.randn(T, D), apart),
        "weight": twins.Computed(1 + 0.3 * torch.randn(D)),
        "rms": rms, "mean": None if rms else twins.Computed(mean), "rstd": twins.Computed(rstd),
        "dropout_p": 0.3, "seed": SEED,
        "dx": twins.Result((T, D)), "dresidual": twins.Result((T, D)), **channels,
    }  # fmt: skip


def check(tolerances, by, twins, T, D, dtype, device, **options):
    given = forward_arguments(twins, T, D, **options)
    twins.assert_alike(tolerances, by, "layer_norm", "layer_norm_forward", given, dtype, device)
    given = backward_arguments(twins, T, D, dtype, **options)
    twins.assert_alike(tolerances, by, "layer_norm", "layer_norm_backward", given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("rms", [False, True])
def test_launchers(by, tolerances, twins, device, rms, T, D, dtype):
    check(tolerances, by, twins, T, D, dtype, device, rms=rms)


@pytest.mark.parametrize(("T", "D"), ODD)
def test_launchers_at_odd_sizes(by, tolerances, twins, device, T, D):
    check(tolerances, by, twins, T, D, torch.bfloat16, device, apart=3)


def fused(x, residual, weight, bias, backend):
    return ops.layer_norm(
        x, weight, bias, residual=residual, dropout_p=0.1, training=True, seed=5, backend=backend
    )


def inputs(twins, T, D, names=("x", "residual")):
    rows = {name: twins.Stored(torch.randn(T, D)) for name in names}
    return rows | {
        "weight": twins.Computed(1 + 0.3 * torch.randn(D)),
        "bias": twins.Computed(torch.randn(D)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op(by, tolerances, twins, device, dtype):
    given = inputs(twins, *SHAPES[0])
    twins.assert_op_alike(tolerances, by, "layer_norm", fused, given, dtype, device)


def test_op_of_a_slice(by, tolerances, twins, device):
    """(B, S, D) whose rows stand apart, without residual and dropout."""
    B, S, D = 3, SHAPES[0][0] // 3, SHAPES[0][1] - 1
    given = inputs(twins, B * S, D, names=("x",))
    given["x"] = twins.Stored(torch.randn(B, S, D), apart=5)
    twins.assert_op_alike(
        tolerances, by, "layer_norm", ops.layer_norm, given, torch.bfloat16, device
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_linear(by, tolerances, twins, device, dtype):
    T, D = SHAPES[0]

    def function(x, residual, norm_weight, norm_bias, weight, bias, backend):
        return ops.norm_linear(
            x, norm_weight, norm_bias, weight, bias, residual=residual, dropout_p=0.1,
            training=True, seed=5, backend=backend,
        )  # fmt: skip

    given = inputs(twins, T, D)
    given["norm_weight"], given["norm_bias"] = given.pop("weight"), given.pop("bias")
    given["weight"] = twins.Stored(torch.randn(2 * D, D) / D**0.5)
    given["bias"] = twins.Stored(torch.randn(2 * D))
    twins.assert_op_alike(tolerances, by, "layer_norm", function, given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(by, device, dtype):
    T, D = SHAPES[0]
    x = torch.ones(T, D, dtype=dtype, device=device)
    zero = torch.zeros_like(x)
    seed = SEED.to(device)
    _, s = ops.layer_norm(
        x, None, None, residual=zero, dropout_p=0.3, training=True, seed=seed, backend=by
    )
    expected = dropout_mask(int(SEED), T, D, 0.3)
    assert torch.equal(s.cpu() != 0, expected != 0)
    # A dropped infinity leaves nothing.
    _, s = ops.layer_norm(
        x * torch.inf, None, None, residual=zero, dropout_p=0.3, training=True, seed=seed,
        backend=by,
    )  # fmt: skip
    assert torch.equal(s.cpu().isinf(), expected != 0)


def test_the_reference_draws_alike_on_both_devices(device):
    x = torch.ones(17, 40)
    on_device = dropout(x.to(device), 0.3, SEED.to(device)).cpu()
    assert torch.equal(on_device, dropout(x, 0.3, SEED))


def test_20_runs_are_alike_to_the_bit(by, twins, device):
    repeats = 20 if device == "cuda" else 1
    given = inputs(twins, *REPEATED)
    twins.assert_repeatable(by, fused, given, torch.bfloat16, device, repeats)


def test_more_than_2_31_elements(by, tolerances, room, device):
    room(36)
    T, D = LARGE
    x, residual, dy, ds = (
        torch.empty(T, D, dtype=torch.bfloat16, device=device).normal_() for _ in range(4)
    )
    x.requires_grad_(), residual.requires_grad_()
    w, b = (torch.randn(D, device=device, requires_grad=True) for _ in range(2))
    y, s = ops.layer_norm(x, w, b, residual=residual, backend=by)
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
