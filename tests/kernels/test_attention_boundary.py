"""The boundary kernels of attention residuals against the launchers of the reference in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from deepfast import backend
from deepfast.depth.pattern import block_pattern, depth_pattern
from deepfast.depth.schedule import Schedule
from deepfast.depth.state import DepthState, empty_slots
from deepfast.reference import launchers as reference

LOW = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(0, 64), (1, 1), (5, 17), (33, 64), (5, 100), (1, 255), (3, 512)]
ROWS, SLOT = 10, 4
FULL = {
    "kind": "softmax", "bias": False, "near": (2, 3, 4), "pulls": (4, 5, 6, 7), "p": 0.3,
    "replay": False, "residual": True, "far": True, "dx": True, "dout": True, "out_bias": True,
    "rms": False, "grad": True, "inplace": True,
}  # fmt: skip
RELU = {"kind": "relu", "bias": True}


@pytest.fixture
def kernels():
    """Triton's launches; without a GPU in the interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return backend.choose("attention_boundary", "triton", device, torch.float32)[1]


def storage(shape, dtype):
    return torch.empty(shape, dtype=dtype)


def strided(shape, dtype):
    """Rows as in a wider tensor: an odd distance apart."""
    return torch.empty(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]


def operands(T, D, dtype, options):
    names = ("branch", "residual", "partial", "pulled", "dx", "dout")
    given = {name: torch.randn(T, D).to(dtype) for name in names}
    absent = {
        "branch": options["replay"], "residual": not options["residual"],
        "partial": not options["far"], "pulled": not options["far"], "dx": not options["dx"],
        "dout": not options["dout"],
    }  # fmt: skip
    given = {name: None if absent[name] else x for name, x in given.items()}
    softmax = options["kind"] == "softmax"
    stats = torch.stack((3 + torch.rand(ROWS, T), 1 + torch.rand(ROWS, T), torch.randn(ROWS, T)), 1)
    return given | {
        "states": torch.randn(ROWS + 1, T, D).to(dtype),
        "query": torch.randn(ROWS, D) / D**0.5,
        "bias": torch.randn(ROWS, ROWS) if options["bias"] else None,
        "stats": stats if softmax else None,
        "partial_stats": 0.5 + torch.rand(2, T) if softmax and options["far"] else None,
        "out_norm_weight": 1 + 0.3 * torch.randn(D),
        "out_norm_bias": torch.randn(D) if options["out_bias"] else None,
        "seed": torch.tensor(3 << 40) if options["p"] else None,
    }


def run(launch, given, options, dtype, compute=torch.float32, rows=storage):
    """Forward and backward of one boundary; ``rows`` makes the operands' memory."""
    T, D = given["states"].shape[1:]
    a = {
        name: None if given[name] is None else rows((T, D), dtype).copy_(given[name])
        for name in ("branch", "residual", "partial", "pulled", "dx", "dout")
    }
    names = ("query", "bias", "stats", "partial_stats", "out_norm_weight", "out_norm_bias")
    w = {
        name: None if given[name] is None else given[name].to(compute, copy=True) for name in names
    }
    states = empty_slots(ROWS + 1, rows((T, D), dtype)).copy_(given["states"])
    source_rstd = (states[:ROWS].to(compute).square().mean(-1) + 1e-6).rsqrt().contiguous()
    stats = w["stats"]
    if stats is not None:
        stats[SLOT] = torch.nan
    source_rstd[SLOT] = given.get("own_rstd", source_rstd[SLOT] if options["replay"] else torch.nan)
    out_norm = w["out_norm_weight"], w["out_norm_bias"]
    weights = w["query"], w["bias"], options["kind"]
    far, dropout = (a["partial"], w["partial_stats"]), (options["p"], given["seed"])
    near, pulls = list(options["near"]), list(options["pulls"])
    x, out, dbranch, dresidual = (rows((T, D), dtype) for _ in range(4))
    mean, rstd = torch.empty(2, T, dtype=compute)
    mean = None if options["rms"] else mean
    launch.attention_boundary_forward(
        a["branch"], a["residual"], *dropout, states, SLOT, near, *weights, 1e-6, *far, *out_norm,
        1e-5, options["rms"], x, out, source_rstd, stats, mean, rstd,
    )  # fmt: skip
    results = {"x": x, "out": out, "mean": mean, "rstd": rstd, "state": states[SLOT].clone()}
    results["source_rstd"] = source_rstd
    if stats is not None:
        results |= {"most": stats[:, 0].clone(), "total": stats[:, 1].clone()}
    grads = states if options["inplace"] else states.clone()
    # The launch adds to dquery, and sets its own entries of dbias.
    dquery = torch.ones_like(w["query"]) if options["grad"] else None
    dbias = None
    if options["grad"] and w["bias"] is not None:
        dbias = torch.full_like(w["bias"], 7)
    dout_norm_weight, dout_norm_bias = torch.empty(2, D, dtype=compute)
    if not options["dout"]:
        dout_norm_weight = dout_norm_bias = None
    launch.attention_boundary_backward(
        states, SLOT, near, *weights, *far, *out_norm, options["rms"], source_rstd, stats, mean,
        rstd, *dropout, a["dx"], a["dout"], grads, SLOT + 1, pulls, [row + 1 for row in pulls],
        a["pulled"], dbranch, dresidual, dquery, dbias, dout_norm_weight, dout_norm_bias,
    )  # fmt: skip
    results |= {
        "g": grads[SLOT + 1], "dbranch": dbranch, "dresidual": dresidual, "dquery": dquery,
        "dbias": dbias, "dout_norm_weight": dout_norm_weight, "dout_norm_bias": dout_norm_bias,
        "delta": None if stats is None else stats[:, 2],
    }  # fmt: skip
    return {name: value for name, value in results.items() if value is not None}


def compare(tolerances, kernels, T, D, dtype, rows=storage, **options):
    options = FULL | options
    given = operands(T, D, dtype, options)
    got = run(kernels, given, options, dtype, rows=rows)
    plain = run(reference, given, options, dtype)
    exact = run(reference, given, options, torch.float64, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("options", [{}, RELU], ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_agrees(tolerances, poison, kernels, T, D, options, dtype):
    compare(tolerances, kernels, T, D, dtype, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("more", [{}, RELU, {"bias": True}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"p": 0.0},
        {"residual": False},
        {"far": False},
        {"dx": False},
        {"dout": False},
        {"replay": True},
        {"inplace": False},
        {"out_bias": False, "rms": True},
        {"grad": False},
    ],
    ids=str,
)
def test_options(tolerances, poison, kernels, options, more):
    compare(tolerances, kernels, 5, 100, torch.float32, **more, **options)


@pytest.mark.parametrize("options", [{}, RELU], ids=str)
@pytest.mark.parametrize(
    ("near", "pulls"),
    [
        ((4,), (4,)),
        ((0, 2, 4), (4, 6, 8)),
        ((0, 1, 2, 3, 4), (4, 5)),
        ((0, 1, 4), (4, 5, 9)),
        ((3, 1), (9, 4)),
        ((1, 3), (5, 7, 9)),
        ((4,), ()),
    ],
)
def test_patterns(tolerances, poison, kernels, near, pulls, options):
    """Blocks, any order, and rows that do not read their own state."""
    compare(tolerances, kernels, 5, 33, torch.float32, near=near, pulls=pulls, **options)


def test_rows_apart(tolerances, poison, kernels):
    compare(tolerances, kernels, 5, 17, torch.bfloat16, rows=strided)


def test_many_tiles(tolerances, poison, kernels):
    """More tiles than programs: the sums over tokens continue from tile to tile."""
    compare(tolerances, kernels, 37, 512, torch.float32, near=(4,), pulls=(4, 5))


def test_nothing_is_read_is_zero(poison, kernels):
    options = FULL | {"near": (), "far": False, "pulls": (5, 6)}
    given = operands(3, 17, torch.float32, options)
    got = run(kernels, given, options, torch.float32)
    assert not got["x"].any()
    assert torch.equal(got["out"], given["out_norm_bias"].expand(3, 17))


def test_not_a_number_ends(kernels):
    """Such numbers spread, and the launch returns."""
    given = operands(5, 33, torch.float32, FULL)
    given["states"][2, 0], given["states"][3, 1] = torch.nan, torch.inf
    got, expected = (
        run(launch, given, FULL, torch.float32) for launch in (kernels, reference)
    )  # fmt: skip
    assert got["x"][:2].isnan().any(-1).all()
    torch.testing.assert_close(got["x"][2:], expected["x"][2:])


def test_what_is_not_wanted_is_not_written(kernels):
    """Without x, without a norm of the output, without any gradient but that of the branch."""
    states, query, branch = torch.zeros(3, 4, 17), torch.zeros(2, 17), torch.randn(4, 17)
    source_rstd, bias = torch.ones(2, 4), torch.ones(2, 2)
    kernels.attention_boundary_forward(
        branch, None, 0.0, None, states, 1, [0, 1], query, bias, "relu", 1e-6, None, None, None,
        None, 0.0, False, None, None, source_rstd, None, None, None,
    )  # fmt: skip
    assert torch.equal(states[1], branch)
    assert source_rstd[0].eq(1).all()
    dx, dbranch = torch.randn(4, 17), torch.empty(4, 17)
    kernels.attention_boundary_backward(
        states, 1, [0, 1], query, bias, "relu", None, None, None, None, False, source_rstd, None,
        None, None, 0.0, None, dx, None, states, 2, [1], [2], None, dbranch, None, None, None, None,
        None,
    )  # fmt: skip
    torch.testing.assert_close(dbranch, dx)
    assert torch.equal(states[2], dx)


def test_replay_is_alike_to_the_bit(kernels):
    """A layer's input, recomputed from the states, has the same bits as in forward."""
    given = operands(5, 33, torch.bfloat16, FULL)
    first = run(kernels, given, FULL, torch.bfloat16)
    again = given | {"branch": None, "own_rstd": first["source_rstd"][SLOT]}
    again["states"] = given["states"].clone()
    again["states"][SLOT] = first["state"]
    second = run(kernels, again, FULL | {"replay": True}, torch.bfloat16)
    assert all(torch.equal(first[name], second[name]) for name in ("x", "out", "mean", "rstd"))


@pytest.mark.parametrize("options", [{}, RELU], ids=str)
def test_two_runs_are_alike_to_the_bit(kernels, options):
    options = FULL | options
    given = operands(37, 64, torch.bfloat16, options)
    first, second = (run(kernels, given, options, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lists", [{"near": (0, 1, 3, 4)}, {"pulls": (4, 5, 6, 8)}], ids=str)
def test_triton_takes_progressions(lists, kernels):
    options = FULL | lists
    given = operands(3, 17, torch.float32, options)
    expected = r"attention_boundary: (near|pull_rows) but k must be an arithmetic"
    with pytest.raises(ValueError, match=expected):
        run(kernels, given, options, torch.float32)


def test_every_pattern_gives_progressions():
    """Whatever row the backward pass begins at."""
    kernels = pytest.importorskip("deepfast.kernels.common")
    rows = 13
    patterns = [block_pattern(rows, size)[0] for size in (1, 2, 3, 4, 6, 12)]
    patterns += [depth_pattern(rows, window, 1, 1) for window in (None, 1, 3, 6, 9)]
    for block, pattern in itertools.product((1, 2, 4, 8, 64), patterns):
        schedule = Schedule(pattern, block)
        for top, k in itertools.combinations_with_replacement(reversed(range(rows)), 2):
            state = SimpleNamespace(schedule=schedule, _live=set(range(k + 1, top + 1)))
            for indices in (schedule.near[k], DepthState.near_pull(state, k)):
                assert kernels.progression([i for i in indices if i != k]) is not None
