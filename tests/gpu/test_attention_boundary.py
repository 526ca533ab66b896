"""The launchers of attention residuals on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, SLOT, NEAR, PULLS = 10, 4, [2, 3, 4], [4, 5, 6, 7]
FAR_ROWS, FAR_SOURCES = [4, 5, 6, 7], [0, 1, 2, 3]
SEED = torch.tensor(3 << 40)
if torch.cuda.is_available():
    SHAPES, ODD = [(8192, 512), (2048, 1024)], [(512, 4096), (1023, 255), (0, 512)]
else:
    SHAPES, ODD = [(5, 32)], [(3, 17), (0, 16)]


@pytest.fixture
def by(device):
    pytest.importorskip("triton")
    return "triton"


def shared_arguments(twins, T, D, kind):
    """What all four launches have, and the statistics of an earlier forward pass."""
    softmax = kind == "softmax"
    stats = torch.stack((3 + torch.rand(ROWS, T), 1 + torch.rand(ROWS, T), torch.randn(ROWS, T)), 1)
    return {
        "query": twins.Computed(torch.randn(ROWS, D) / D**0.5),
        "bias": None if softmax else twins.Computed(torch.randn(ROWS, ROWS)), "kind": kind,
        "source_rstd": twins.Computed(0.5 + torch.rand(ROWS, T)),
    }, twins.Computed(stats) if softmax else None  # fmt: skip


def boundary_arguments(twins, T, D, kind, out_rms):
    given, stats = shared_arguments(twins, T, D, kind)
    far = twins.Computed(0.5 + torch.rand(2, T)) if kind == "softmax" else None
    return given | {
        "k": SLOT, "near": NEAR, "stats": stats, "partial": twins.Stored(torch.randn(T, D)),
        "partial_stats": far, "out_norm_weight": twins.Computed(1 + 0.3 * torch.randn(D)),
        "out_norm_bias": twins.Computed(torch.randn(D)), "out_rms": out_rms,
        "dropout_p": 0.3, "seed": SEED,
    }  # fmt: skip


def forward_arguments(twins, T, D, *, kind="softmax", apart=0, out_rms=False):
    return boundary_arguments(twins, T, D, kind, out_rms) | {
        "branch": twins.Stored(torch.randn(T, D), apart),
        "residual": twins.Stored(torch.randn(T, D), apart),
        "states": twins.Slots(torch.randn(ROWS + 1, T, D)), "eps": 1e-6, "out_eps": 1e-5,
        "x": twins.Result((T, D)), "out": twins.Result((T, D)),
        "out_mean": None if out_rms else twins.Result((T,), stored=False),
        "out_rstd": twins.Result((T,), stored=False),
    }  # fmt: skip


def backward_arguments(twins, T, D, *, kind="softmax", apart=0, out_rms=False):
    given = boundary_arguments(twins, T, D, kind, out_rms)
    bias = given["bias"]
    return given | {
        "states": twins.Slots(torch.randn(ROWS, T, D)),
        "grads": twins.Slots(torch.randn(ROWS + 1, T, D)),
        "grad_slot": SLOT + 1,
        "pull_rows": PULLS, "pull_slots": [r + 1 for r in PULLS],
        "out_mean": None if out_rms else twins.Computed(torch.randn(T)),
        "out_rstd": twins.Computed(0.5 + torch.rand(T)),
        "dx": twins.Stored(torch.randn(T, D), apart),
        "dout": twins.Stored(torch.randn(T, D), apart),
        "pulled": twins.Stored(torch.randn(T, D)),
        "dbranch": twins.Result((T, D)), "dresidual": twins.Result((T, D)),
        "dquery": twins.Computed(torch.zeros(ROWS, D)),
        "dbias": None if bias is None else twins.Computed(torch.zeros_like(bias.x)),
        "dout_norm_weight": twins.Result((D,), stored=False),
        "dout_norm_bias": twins.Result((D,), stored=False),
    }  # fmt: skip


def rows_arguments(twins, T, D, *, kind="softmax"):
    """The far pass of forward. Rows that several passes compute add to it."""
    given, _ = shared_arguments(twins, T, D, kind)
    stats = torch.stack((torch.randn(len(FAR_ROWS), T), 1 + torch.rand(len(FAR_ROWS), T)), 1)
    return given | {
        "states": twins.Slots(torch.randn(ROWS, T, D)), "sources": FAR_SOURCES, "rows": FAR_ROWS,
        "out": twins.Slots(torch.randn(len(FAR_ROWS), T, D)),
        "out_stats": twins.Computed(stats) if kind == "softmax" else None,
        "out_rows": list(range(len(FAR_ROWS))), "accumulate": True,
    }  # fmt: skip


def pull_arguments(twins, T, D, *, kind="softmax"):
    given, stats = shared_arguments(twins, T, D, kind)
    bias = given["bias"]
    return given | {
        "grads": twins.Slots(torch.randn(ROWS + 1, T, D)),
        "grad_slots": [r + 1 for r in FAR_ROWS], "rows": FAR_ROWS,
        "states": twins.Slots(torch.randn(ROWS, T, D)), "sources": FAR_SOURCES, "stats": stats,
        "out": twins.Slots(torch.randn(len(FAR_SOURCES), T, D)),
        "out_rows": list(range(len(FAR_SOURCES))), "accumulate": True,
        "dquery": twins.Computed(torch.zeros(ROWS, D)),
        "dbias": None if bias is None else twins.Computed(torch.zeros_like(bias.x)),
    }  # fmt: skip


LAUNCHES = {
    "attention_boundary_forward": forward_arguments,
    "attention_boundary_backward": backward_arguments,
    "attend_rows": rows_arguments,
    "attend_pull": pull_arguments,
}


def check(tolerances, by, twins, T, D, dtype, device, name, **options):
    given = LAUNCHES[name](twins, T, D, **options)
    twins.assert_alike(tolerances, by, "attention_boundary", name, given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_launchers(by, tolerances, twins, device, name, kind, dtype):
    check(tolerances, by, twins, *SHAPES[0], dtype, device, name, kind=kind)


@pytest.mark.parametrize(("T", "D"), [*SHAPES[1:], *ODD])
@pytest.mark.parametrize("name", LAUNCHES)
def test_launchers_at_other_sizes(by, tolerances, twins, device, name, T, D):
    apart = {"apart": 3} if D % 2 and "boundary" in name else {}
    check(tolerances, by, twins, T, D, torch.bfloat16, device, name, **apart)


@pytest.mark.parametrize("name", ["attention_boundary_forward", "attention_boundary_backward"])
def test_rms_norm_of_the_output(by, tolerances, twins, device, name):
    check(tolerances, by, twins, *SHAPES[0], torch.bfloat16, device, name, out_rms=True)


@pytest.mark.parametrize("name", LAUNCHES)
def test_20_runs_are_alike_to_the_bit(by, twins, device, name):
    given, dtype = LAUNCHES[name](twins, *SHAPES[0]), torch.bfloat16
    runs = (
        twins.call("attention_boundary", name, by, given, dtype, dtype, device)
        for _ in range(21 if device == "cuda" else 2)
    )
    first = next(runs)
    assert all(torch.equal(first[key], run[key]) for run in runs for key in first)
