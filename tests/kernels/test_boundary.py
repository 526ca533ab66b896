"""The kernels of both boundaries: options, patterns, and what they do not write."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from deepfast.depth.schedule import Schedule, block_pattern, depth_pattern
from deepfast.launches import LAUNCHES
from tests.kernels.agreement import BOTH, agree, numbers, run, served

OPS = ("boundary", "attention_boundary")
FP32 = torch.float32
NO_OUT = dict.fromkeys(
    ("out", "dout", "out_mean", "out_rstd", "dout_norm_weight", "dout_norm_bias")
)
NO_NORM = {"norm_source": False, "source_rstd": None}
OUT_RMS = {"out_rms": True, "out_mean": None}
SOURCE_RMS = {"source_rms": True, "norm_bias": None, "dnorm_bias": None}
NO_AFFINE = dict.fromkeys(("norm_weight", "norm_bias", "dnorm_weight", "dnorm_bias"))
RELU = {"kind": "relu", "stats": None, "partial_stats": None}
PER_CHANNEL = {"choice": 1}
SERVED = pytest.mark.only_if(lambda kernels, op: served(kernels, f"{op}_forward"))


def both(tolerances, kernels, op, dtype=FP32, T=5, D=100, **given):
    """Forward, and backward with its gradients in the slots of the states and apart from them."""
    agree(tolerances, kernels, f"{op}_forward", dtype, T=T, D=D, **given)
    for grads in ({"grads": "states"}, {}):
        agree(tolerances, kernels, f"{op}_backward", dtype, T=T, D=D, **given, **grads)


SHARED = [
    {},
    {"dropout_p": 0.0},
    {"residual": None, "dresidual": None},
    {"partial": None, "partial_stats": None, "pulled": None},
    {"dx": None},
    NO_OUT,
    {"branch": None, "dbranch": None},
    OUT_RMS,
    OUT_RMS | {"out_norm_bias": None, "dout_norm_bias": None},
    dict.fromkeys(("out_norm_weight", "out_norm_bias", "dout_norm_weight", "dout_norm_bias")),
]


@BOTH
@pytest.mark.each_value
@pytest.mark.parametrize("options", [
    *SHARED,
    NO_NORM | NO_AFFINE,
    NO_NORM,
    {"norm_bias": None, "dnorm_bias": None},
    OUT_RMS | {"dx": None} | PER_CHANNEL,
    OUT_RMS | {"source_rms": True},
    SOURCE_RMS,
    SOURCE_RMS | OUT_RMS | PER_CHANNEL,
    SOURCE_RMS | NO_AFFINE | {"dropout_p": 0.0, "residual": None},
    SOURCE_RMS | {"branch": None},
    PER_CHANNEL,
    PER_CHANNEL | NO_NORM | NO_AFFINE,
], ids=str)  # fmt: skip
def test_options(tolerances, poison, kernels, options):
    both(tolerances, kernels, "boundary", **options)


@pytest.mark.each_value
@pytest.mark.parametrize("more", [{"bias": None, "dbias": None}, RELU, {}], ids=str)
@pytest.mark.parametrize("options", [*SHARED, {"dquery": None, "dbias": None}], ids=str)
def test_options_of_attention(tolerances, poison, kernels, options, more):
    both(tolerances, kernels, "attention_boundary", **more | options)


@BOTH
def test_the_only_row_of_its_block_may_be_wide(tolerances, poison, kernels):
    """Its table fits a block, but a row takes more threads than registers leave room for."""
    lists = {"near": [4], "pull_rows": [4], "pull_slots": [5]}
    both(tolerances, kernels, "boundary", torch.bfloat16, 2, 8192, **lists)


@BOTH
@SERVED
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, PER_CHANNEL], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("near", "pulls"), [
    ((4,), (4,)),
    ((0, 2, 4), (4, 6, 8)),
    ((0, 1, 2, 3, 4), (4, 5)),
    ((0, 1, 4), (4, 5, 9)),
    ((3, 1), (9, 4)),
    ((1, 3), (5, 7, 9)),
    ((4,), ()),
])  # fmt: skip
def test_patterns(tolerances, poison, kernels, op, near, pulls, options):
    """Dilation, periods, blocks, any order, and rows that do not read their own state."""
    lists = {"near": near, "pull_rows": pulls, "pull_slots": [row + 1 for row in pulls]}
    both(tolerances, kernels, op, D=33, **lists, **options)


@BOTH
@SERVED
@pytest.mark.parametrize("op", OPS)
def test_nothing_is_read_is_zero(poison, kernels, op):
    given = numbers(f"{op}_forward", T=3, D=17, near=[], partial=None, partial_stats=None)
    got = run(kernels(op), f"{op}_forward", given, FP32, FP32)
    assert not got["x"].any()
    assert torch.equal(got["out"], given["out_norm_bias"].expand(3, 17))


def test_not_a_number_ends(kernels):
    """Such numbers spread, and the launch returns."""
    name = "attention_boundary_forward"
    given = numbers(name, T=5, D=33)
    expected = run(kernels("attention_boundary"), name, given, FP32, FP32)
    given["states"][2, 0], given["states"][3, 1] = torch.nan, torch.inf
    got = run(kernels("attention_boundary"), name, given, FP32, FP32)
    assert got["x"][:2].isnan().any(-1).all()
    assert torch.equal(got["x"][2:], expected["x"][2:])


@BOTH
@SERVED
@pytest.mark.parametrize("op", OPS)
def test_what_is_not_wanted_is_not_written(kernels, op):
    """Without x, without a norm of the output, without any gradient but that of the branch."""
    states, branch = torch.zeros(3, 4, 17), torch.randn(4, 17)
    weight, source_rstd = torch.randn(2, 2), torch.ones(2, 4)
    shared = {"states": states, "k": 1, "near": [0, 1], "dropout_p": 0.0, "out_rms": False}
    if op == "boundary":
        shared |= {"weight": weight, "norm_source": False, "source_rms": False}
        forward = {"source_eps": 0.0}
    else:
        shared |= {"query": torch.zeros(2, 17), "bias": torch.ones(2, 2), "kind": "relu"}
        shared |= {"source_rstd": source_rstd}
        forward = {"eps": 1e-6}
    launches = kernels(op)
    getattr(launches, f"{op}_forward")(**shared, **forward, branch=branch, out_eps=0.0)
    assert torch.equal(states[1], branch)
    assert source_rstd[0].eq(1).all()
    dx, dbranch = torch.randn(4, 17), torch.empty(4, 17)
    getattr(launches, f"{op}_backward")(
        **shared, dx=dx, grads=states, grad_slot=2, pull_rows=[1], pull_slots=[2], dbranch=dbranch
    )
    torch.testing.assert_close(dbranch, dx * (weight[1, 1] if op == "boundary" else 1))
    assert torch.equal(states[2], dx)


@BOTH
@SERVED
@pytest.mark.parametrize("op", OPS)
def test_replay_is_alike_to_the_bit(kernels, op):
    """A layer's input, recomputed from the states, has the same bits as in forward."""
    name, dtype = f"{op}_forward", torch.bfloat16
    given = numbers(name, T=5, D=33)
    first = run(kernels(op), name, given, dtype, dtype)
    again = given | {"branch": None, "states": first["states"].float()}
    if op == "attention_boundary":
        again["source_rstd"] = first["source_rstd"]
    second = run(kernels(op), name, again, dtype, dtype)
    assert all(torch.equal(first[key], second[key]) for key in ("x", "out", "out_mean", "out_rstd"))


@pytest.mark.parametrize("lists", [
    {"near": (0, 1, 3, 4)}, {"pull_rows": (4, 5, 6, 8), "pull_slots": (5, 6, 7, 9)}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("op", OPS)
def test_triton_takes_progressions(op, lists):
    module = pytest.importorskip(f"deepfast.kernels.{op}")
    name = f"{op}_backward"
    launch = LAUNCHES[name]
    launches = SimpleNamespace(**{name: launch.by_name(getattr(module, name))})
    expected = rf"{op}: (near|pull_rows) but k must be an arithmetic"
    with pytest.raises(ValueError, match=expected):
        run(launches, name, numbers(name, T=3, D=17, **lists), FP32, FP32)


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
    patterns = [block_pattern(rows, size)[0] for size in (1, 2, 3, 4, 6, 12)]
    patterns += [
        depth_pattern(rows, *options)
        for options in itertools.product((None, 1, 3, 6, 9), (1, 2, 3), (1, 2, 3, 4))
    ]
    for block, pattern in itertools.product((1, 4, 8, 64), patterns):
        schedule = Schedule(pattern, block)
        for top, k in itertools.combinations_with_replacement(reversed(range(rows)), 2):
            for indices in (schedule.near[k], schedule.near_readers(k, top)):
                assert kernels.progression([i for i in indices if i != k]) is not None
