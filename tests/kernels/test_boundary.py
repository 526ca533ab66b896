"""The boundary kernels against the launchers of the reference in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from deepfast.depth.pattern import depth_pattern
from deepfast.depth.schedule import Schedule
from deepfast.depth.state import DepthState, empty_slots
from deepfast.reference import launchers as reference

OP = "boundary"
LOW = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(0, 64), (1, 1), (5, 17), (17, 64), (5, 100), (1, 255), (2, 512)]
ROWS, SLOT = 10, 4
FULL = {
    "near": (2, 3, 4), "pulls": (4, 5, 6, 7, 8, 9), "p": 0.3, "replay": False, "residual": True,
    "norm": True, "norm_weight": True, "norm_bias": True, "vector": False, "far": True, "dx": True,
    "dout": True, "inplace": True, "out_rms": False, "source_rms": False,
}  # fmt: skip

SOURCE_RMS = {"source_rms": True, "norm_bias": False}


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
    return given | {
        "states": torch.randn(ROWS + 1, T, D).to(dtype),
        "weight": torch.randn(ROWS, ROWS, *([D] if options["vector"] else [])),
        "norm_weight": 1 + 0.3 * torch.randn(ROWS, D) if options["norm_weight"] else None,
        "norm_bias": torch.randn(ROWS, D) if options["norm_bias"] else None,
        "out_norm_weight": 1 + 0.3 * torch.randn(D),
        "out_norm_bias": torch.randn(D),
        "seed": torch.tensor(3 << 40) if options["p"] else None,
    }


def run(launch, given, options, dtype, compute=torch.float32, rows=storage):
    """Forward and backward of one boundary; ``rows`` makes the operands' memory."""
    T, D = given["states"].shape[1:]
    a = {
        name: None if given[name] is None else rows((T, D), dtype).copy_(given[name])
        for name in ("branch", "residual", "partial", "pulled", "dx", "dout")
    }
    names = ("weight", "norm_weight", "norm_bias", "out_norm_weight", "out_norm_bias")
    w = {name: None if given[name] is None else given[name].to(compute) for name in names}
    states = empty_slots(ROWS + 1, rows((T, D), dtype)).copy_(given["states"])
    out_norm = w["out_norm_weight"], w["out_norm_bias"]
    dropout = options["p"], given["seed"]
    near, pulls = list(options["near"]), list(options["pulls"])
    x, out, dbranch, dresidual = (rows((T, D), dtype) for _ in range(4))
    source_rstd, mean, rstd = torch.empty(3, T, dtype=compute)
    source_rms, out_rms = options["source_rms"], options["out_rms"]
    mean = None if out_rms else mean
    launch.boundary_forward(
        a["branch"], a["residual"], *dropout, states, SLOT, near, w["weight"],
        w["norm_weight"], w["norm_bias"], options["norm"], 1e-5, source_rms, a["partial"],
        *out_norm, 1e-5, out_rms, x, out, source_rstd, mean, rstd,
    )  # fmt: skip
    results = {"x": x, "out": out, "mean": mean, "rstd": rstd, "state": states[SLOT].clone()}
    if options["replay"] or not options["norm"]:
        source_rstd.fill_(1)
    results["source_rstd"] = source_rstd
    grads = states if options["inplace"] else states.clone()
    # Entries that the launch does not own must not change.
    dweight = torch.full_like(w["weight"], 7)
    dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias = torch.empty(4, D, dtype=compute)
    if source_rms:
        dnorm_bias = None
    if not options["dout"]:
        dout_norm_weight = dout_norm_bias = None
    launch.boundary_backward(
        states, SLOT, near, w["weight"], w["norm_weight"], w["norm_bias"], options["norm"],
        source_rms, a["partial"], *out_norm, out_rms, source_rstd, mean, rstd, *dropout, a["dx"],
        a["dout"], grads, SLOT + 1, pulls, [row + 1 for row in pulls], a["pulled"], dbranch,
        dresidual, dweight, dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias,
    )  # fmt: skip
    results |= {
        "g": grads[SLOT + 1], "dbranch": dbranch, "dresidual": dresidual, "dweight": dweight,
        "dnorm_weight": dnorm_weight, "dnorm_bias": dnorm_bias,
        "dout_norm_weight": dout_norm_weight, "dout_norm_bias": dout_norm_bias,
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
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("rms", [{}, {"out_rms": True}, SOURCE_RMS], ids=str)
def test_agrees(tolerances, poison, kernels, rms, T, D, dtype):
    compare(tolerances, kernels, T, D, dtype, **rms)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"p": 0.0},
        {"residual": False},
        {"norm": False, "norm_weight": False, "norm_bias": False},
        {"norm": False},
        {"norm_bias": False},
        {"far": False},
        {"dx": False},
        {"dout": False},
        {"replay": True},
        {"inplace": False},
        {"out_rms": True},
        {"out_rms": True, "dx": False, "vector": True},
        {"out_rms": True, "dout": False},
        SOURCE_RMS,
        SOURCE_RMS | {"out_rms": True, "vector": True, "inplace": False},
        SOURCE_RMS | {"norm_weight": False, "p": 0.0, "residual": False},
        SOURCE_RMS | {"replay": True},
        {"vector": True},
        {"vector": True, "norm_weight": False, "norm_bias": False, "norm": False},
    ],
    ids=str,
)
def test_options(tolerances, poison, kernels, options):
    compare(tolerances, kernels, 5, 100, torch.float32, **options)


def test_the_only_row_of_its_block_may_be_wide(tolerances, poison, kernels):
    """Its table fits a block, but a row takes more threads than registers leave room for."""
    compare(tolerances, kernels, 2, 8192, torch.bfloat16, near=(4,), pulls=(4,))


@pytest.mark.parametrize(
    ("near", "pulls", "vector"),
    [
        ((4,), (4,), False),
        ((0, 2, 4), (4, 6, 8), True),
        ((0, 1, 2, 3, 4), (4, 5), False),
        ((0, 1, 4), (4, 5, 9), True),
        ((3, 1), (9, 4), False),
        ((1, 3), (5, 7, 9), False),
        ((4,), (), True),
    ],
)
def test_patterns(tolerances, poison, kernels, near, pulls, vector):
    """Dilation, periods, any order, and rows that do not read their own state."""
    compare(tolerances, kernels, 5, 33, torch.float32, near=near, pulls=pulls, vector=vector)


def test_rows_apart(tolerances, poison, kernels):
    compare(tolerances, kernels, 5, 17, torch.bfloat16, rows=strided)


@pytest.mark.parametrize("vector", [False, True])
def test_many_tiles(tolerances, poison, kernels, vector):
    """More tiles than programs: the sums over tokens continue from tile to tile."""
    compare(tolerances, kernels, 7, 512, torch.float32, vector=vector, near=(4,), pulls=(4, 5))


def test_nothing_is_read_is_zero(poison, kernels):
    options = FULL | {"near": (), "far": False}
    given = operands(3, 17, torch.float32, options)
    got = run(kernels, given, options, torch.float32)
    assert not got["x"].any()
    assert torch.equal(got["out"], given["out_norm_bias"].expand(3, 17))


def test_what_is_not_wanted_is_not_written(kernels):
    """Without x, without a norm of the output, without any gradient but that of the branch."""
    states, weight, branch = torch.zeros(3, 4, 17), torch.randn(2, 2), torch.randn(4, 17)
    kernels.boundary_forward(
        branch, None, 0.0, None, states, 1, [0, 1], weight, None, None, False, 0.0, False, None,
        None, None, 0.0, False, None, None, None, None, None,
    )  # fmt: skip
    assert torch.equal(states[1], branch)
    dx, dbranch = torch.randn(4, 17), torch.empty(4, 17)
    kernels.boundary_backward(
        states, 1, [0, 1], weight, None, None, False, False, None, None, None, False, None, None,
        None, 0.0, None, dx, None, states, 2, [1], [2], None, dbranch, None, None, None, None,
        None, None,
    )  # fmt: skip
    torch.testing.assert_close(dbranch, weight[1, 1] * dx)
    assert torch.equal(states[2], dx)


def test_replay_is_alike_to_the_bit(kernels):
    """A layer's input, recomputed from the states, has the same bits as in forward."""
    given = operands(5, 33, torch.bfloat16, FULL)
    first = run(kernels, given, FULL, torch.bfloat16)
    again = given | {"branch": None, "states": given["states"].clone()}
    again["states"][SLOT] = first["state"]
    second = run(kernels, again, FULL | {"replay": True}, torch.bfloat16)
    assert all(torch.equal(first[name], second[name]) for name in ("x", "out", "mean", "rstd"))


@pytest.mark.parametrize("vector", [False, True])
def test_two_runs_are_alike_to_the_bit(kernels, vector):
    options = FULL | {"vector": vector}
    given = operands(37, 64, torch.bfloat16, options)
    first, second = (run(kernels, given, options, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lists", [{"near": (0, 1, 3, 4)}, {"pulls": (4, 5, 6, 8)}], ids=str)
def test_triton_takes_progressions(lists):
    kernels = pytest.importorskip("deepfast.kernels.boundary")
    options = FULL | lists
    given = operands(3, 17, torch.float32, options)
    with pytest.raises(ValueError, match=r"boundary: (near|pull_rows) but k must be an arithmetic"):
        run(kernels, given, options, torch.float32)


def test_a_progression():
    kernels = pytest.importorskip("deepfast.kernels.common")
    for indices in ([], [3], [3, 4], [1, 3, 5], [7, 4, 1]):
        first, step, count = kernels.progression(indices)
        assert [first + i * step for i in range(count)] == indices
    assert kernels.progression([0, 1, 5]) is None


def test_every_pattern_gives_progressions():
    """Whatever row the backward pass begins at."""
    kernels = pytest.importorskip("deepfast.kernels.common")
    rows = 13
    for block, window, dilation, period in itertools.product(
        (4, 8, 64), (None, 1, 3, 6, 9), (1, 2, 3), (1, 2, 3, 4)
    ):
        schedule = Schedule(depth_pattern(rows, window, dilation, period), block)
        for top, k in itertools.combinations_with_replacement(reversed(range(rows)), 2):
            state = SimpleNamespace(schedule=schedule, _live=set(range(k + 1, top + 1)))
            for indices in (schedule.near[k], DepthState.near_pull(state, k)):
                assert kernels.progression([i for i in indices if i != k]) is not None
