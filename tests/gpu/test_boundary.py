"""The boundary's launchers on a GPU."""

import pytest
import torch

from deepfast import backend
from deepfast.depth.state import empty_slots
from deepfast.reference.dropout import dropout_mask

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, SLOT, NEAR, PULLS = 10, 4, [2, 3, 4], [4, 5, 6, 7, 8, 9]
SEED = torch.tensor(3 << 40)
if torch.cuda.is_available():
    SHAPES, ODD = [(8192, 512), (2048, 1024)], [(512, 4096), (1023, 255), (0, 512)]
    LARGE = (524_800, 4096)
else:
    SHAPES, ODD, LARGE = [(5, 32)], [(3, 17), (0, 16)], (12, 16)


def shared_arguments(twins, T, D, per_channel, rms):
    weight = torch.randn((ROWS, ROWS, D) if per_channel else (ROWS, ROWS))
    return {
        "k": SLOT, "near": NEAR, "weight": twins.Computed(weight),
        "norm_weight": twins.Computed(1 + 0.3 * torch.randn(ROWS, D)),
        "norm_bias": None if rms else twins.Computed(torch.randn(ROWS, D)),
        "norm_source": True, "source_rms": rms, "partial": twins.Stored(torch.randn(T, D)),
        "out_norm_weight": twins.Computed(1 + 0.3 * torch.randn(D)),
        "out_norm_bias": twins.Computed(torch.randn(D)), "out_rms": rms,
        "dropout_p": 0.3, "seed": SEED,
    }  # fmt: skip


def forward_arguments(twins, T, D, *, apart=0, per_channel=False, rms=False):
    return shared_arguments(twins, T, D, per_channel, rms) | {
        "branch": twins.Stored(torch.randn(T, D), apart),
        "residual": twins.Stored(torch.randn(T, D), apart),
        "states": twins.Slots(torch.randn(ROWS + 1, T, D)),
        "source_eps": 1e-5, "out_eps": 1e-5,
        "x": twins.Result((T, D)), "out": twins.Result((T, D)),
        "source_rstd": twins.Result((T,), stored=False),
        "out_mean": None if rms else twins.Result((T,), stored=False),
        "out_rstd": twins.Result((T,), stored=False),
    }  # fmt: skip


def backward_arguments(twins, T, D, *, apart=0, per_channel=False, rms=False):
    given = shared_arguments(twins, T, D, per_channel, rms)
    channels = ("dnorm_weight", "dnorm_bias", "dout_norm_weight", "dout_norm_bias")
    return given | {
        "states": twins.Slots(torch.randn(ROWS, T, D)),
        "grads": twins.Slots(torch.randn(ROWS + 1, T, D)),
        "grad_slot": SLOT + 1,
        "pull_rows": PULLS, "pull_slots": [r + 1 for r in PULLS],
        "source_rstd": twins.Computed(0.5 + torch.rand(T)),
        "out_mean": None if rms else twins.Computed(torch.randn(T)),
        "out_rstd": twins.Computed(0.5 + torch.rand(T)),
        "dx": twins.Stored(torch.randn(T, D), apart),
        "dout": twins.Stored(torch.randn(T, D), apart),
        "pulled": twins.Stored(torch.randn(T, D)),
        "dbranch": twins.Result((T, D)), "dresidual": twins.Result((T, D)),
        # Entries of other rows and columns must not change.
        "dweight": twins.Computed(torch.zeros_like(given["weight"].x)),
        **{name: twins.Result((D,), stored=False) for name in channels},
        **({"dnorm_bias": None} if rms else {}),
    }  # fmt: skip


def check(tolerances, by, twins, T, D, dtype, device, **options):
    given = forward_arguments(twins, T, D, **options)
    twins.assert_alike(tolerances, by, "boundary", "boundary_forward", given, dtype, device)
    given = backward_arguments(twins, T, D, **options)
    twins.assert_alike(tolerances, by, "boundary", "boundary_backward", given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launchers(by, tolerances, twins, device, dtype):
    check(tolerances, by, twins, *SHAPES[0], dtype, device)


@pytest.mark.parametrize(("T", "D"), [*SHAPES[1:], *ODD])
def test_launchers_at_other_sizes(by, tolerances, twins, device, T, D):
    check(tolerances, by, twins, T, D, torch.bfloat16, device, apart=3 if D % 2 else 0)


def test_rms_norms(by, tolerances, twins, device):
    check(tolerances, by, twins, *SHAPES[0], torch.bfloat16, device, rms=True)


def test_a_weight_per_channel(by, tolerances, twins, device):
    check(tolerances, by, twins, *SHAPES[-1], torch.bfloat16, device, per_channel=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(by, twins, device, dtype):
    """States that are stored without a norm show the mask itself."""
    T, D = SHAPES[0]
    given = forward_arguments(twins, T, D) | {
        "branch": twins.Stored(torch.ones(T, D)), "residual": None, "norm_source": False,
        "norm_weight": None, "norm_bias": None, "source_rstd": None,
    }  # fmt: skip
    made = twins.call("boundary", "boundary_forward", by, given, dtype, dtype, device)
    assert torch.equal(made["states"][SLOT] != 0, dropout_mask(int(SEED), T, D, 0.3) != 0)


@pytest.mark.parametrize("name", ["boundary_forward", "boundary_backward"])
def test_20_runs_are_alike_to_the_bit(by, twins, device, name):
    make = forward_arguments if name.endswith("forward") else backward_arguments
    given, dtype = make(twins, *SHAPES[0]), torch.bfloat16
    runs = (
        twins.call("boundary", name, by, given, dtype, dtype, device)
        for _ in range(21 if device == "cuda" else 2)
    )
    first = next(runs)
    assert all(torch.equal(first[key], run[key]) for run in runs for key in first)


def test_more_than_2_31_elements(by, tolerances, room, device):
    """One state of more than 2^31 elements; its last tokens against float64."""
    room(46)
    (T, D), dtype = LARGE, torch.bfloat16
    like = torch.empty(T, D, dtype=dtype, device=device)
    states = empty_slots(3, like).normal_()
    branch, residual, dx = (torch.empty_like(like).normal_() for _ in range(3))
    x, dbranch = torch.empty_like(like), torch.empty_like(like)
    weight = torch.tensor([[1.0, 0.0], [0.5, -0.75]], device=device)
    dweight = torch.zeros_like(weight)
    _, launch = backend.choose("boundary", by, torch.device(device).type, dtype)
    norm = None, None, False
    launch.boundary_forward(
        branch, residual, 0.0, None, states, 1, [0, 1], weight, *norm, 1e-5, False, None, None,
        None, 0.0, False, x, None, None, None, None,
    )  # fmt: skip
    tail = slice(T - 9, T)
    y = branch[tail].cpu().double() + residual[tail].cpu().double()
    tolerances.assert_accurate(states[1][tail].cpu(), y.to(dtype), y, dtype, "state")
    # The mix reads the state as it is stored.
    expected = 0.5 * states[0][tail].cpu().double() - 0.75 * states[1][tail].cpu().double()
    tolerances.assert_accurate(x[tail].cpu(), expected.to(dtype), expected, dtype, "x")
    y_before = states[1].clone()
    launch.boundary_backward(
        states, 1, [0, 1], weight, *norm, False, None, None, None, False, None, None, None, 0.0,
        None, dx, None, states, 2, [1], [2], None, dbranch, None, dweight, None, None, None, None,
    )  # fmt: skip
    assert torch.equal(states[2][tail], dx[tail])
    expected = -0.75 * dx[tail].cpu().double()
    tolerances.assert_accurate(dbranch[tail].cpu(), expected.to(dtype), expected, dtype, "dbranch")
    parts = [t.flatten().split(1 << 26) for t in (dx, y_before)]
    exact = sum((a.double() @ b.double()).cpu() for a, b in zip(*parts, strict=True))
    plain = sum((a.float() @ b.float()).cpu() for a, b in zip(*parts, strict=True))
    tolerances.assert_accurate(dweight[1, 1].cpu(), plain, exact, torch.float32, "dweight")
