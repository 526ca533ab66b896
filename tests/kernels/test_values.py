"""Launches with values that are not ordinary, and what they promise besides their numbers."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from deepfast.depth.schedule import Schedule, block_pattern, depth_pattern
from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots
from tests.kernels.agreement import SEED, agree, numbers, reference_of, run, served
from tests.kernels.calls import ROWS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPS = ("boundary", "attention_boundary")
EVERY_BOUNDARY = pytest.mark.parametrize(
    ("kernels", "op"),
    [(by, op) for by in ("triton", "cuda") for op in OPS if served(by, f"{op}_forward")],
    indirect=["kernels"],
)


def beside_the_reference(kernels, name, **given):
    made = numbers(name, **given)
    launches = kernels(LAUNCHES[name].op), reference_of(LAUNCHES[name].op)
    return [run(by, name, made, FP32, FP32) for by in launches]


# ---- the activation, the loss, the LSTM --------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "gelu"])
@pytest.mark.parametrize("F", [37, 512])
def test_an_activation_in_place(kernels, kind, F):
    launches = kernels("activation")
    h, dout, bias = torch.randn(7, F), torch.randn(7, F), torch.randn(F)
    given = {"kind": kind, "dropout_p": 0.3, "seed": SEED}
    out, again = torch.empty_like(h), h.clone()
    launches.activation_forward(h=h, bias=bias, out=out, **given)
    launches.activation_forward(h=again, bias=bias, out=again, **given)
    assert torch.equal(out, again)
    saved = out if kind == "relu" else h
    results = [torch.empty_like(h), dout.clone(), saved.clone()]
    for dh, d, s in zip(results, (dout, results[1], dout), (saved, saved, results[2]), strict=True):
        launches.activation_backward(dout=d, saved=s, bias=bias, dh=dh, **given)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("V", [5, 600])
def test_logits_far_apart_and_not_finite(kernels, V):
    x = torch.zeros(6, V)
    x[0, 0], x[1, 1], x[2, :], x[3, 2] = 3e38, -3e38, -math.inf, math.nan
    x[4, 3], x[5, 1:] = math.inf, -math.inf
    given = {"target": torch.zeros(6, dtype=torch.int64), "label_smoothing": 0.0}
    got, want = beside_the_reference(kernels, "cross_entropy", T=6, V=V, logits=x, **given)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got["nll"].isnan().tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("target", [-1, 40, 1 << 40])
def test_a_target_out_of_range_is_nan(kernels, target):
    """A device cannot raise; nothing outside the row is read or written."""
    wide = torch.full((3, 48), math.nan)
    wide[:, :40] = torch.randn(3, 40)
    loss, nll = torch.zeros(2, 3)
    kernels("linear_cross_entropy").cross_entropy(
        logits=wide[:, :40], target=torch.tensor([1, target, 2]), label_smoothing=0.1,
        ignore_index=-7, write_grad=True, loss=loss, nll=nll,
    )  # fmt: skip
    assert loss.isnan().tolist() == nll.isnan().tolist() == [False, True, False]
    assert wide[:, 40:].isnan().all()


@pytest.mark.parametrize("name", ["peephole_lstm_forward", "peephole_lstm_backward"])
def test_a_length_out_of_range_is_the_nearest(kernels, name):
    given = numbers(name, P=2, N=4, H=8, reverse=True)
    got, want = (
        run(kernels("peephole_lstm"), name, given | {"lengths": n}, FP32, FP32)
        for n in (torch.tensor([-2, 0, 2, 9]), torch.tensor([0, 0, 2, 2]))
    )
    assert all(torch.equal(got[key], want[key]) for key in got)


# ---- over depth --------------------------------------------------------------------------------


@EVERY_BOUNDARY
def test_nothing_is_read_is_zero(poison, kernels, op):
    given = numbers(f"{op}_forward", T=3, D=17, near=[], partial=None, partial_stats=None)
    got = run(kernels(op), f"{op}_forward", given, FP32, FP32)
    assert not got["x"].any()
    assert torch.equal(got["out"], given["out_norm_bias"].expand(3, 17))


@EVERY_BOUNDARY
def test_a_replay_is_alike_to_the_bit(kernels, op):
    """A layer's input, recomputed from the states, has the same bits as in forward."""
    name = f"{op}_forward"
    given = numbers(name, T=5, D=33)
    first = run(kernels(op), name, given, BF16, BF16)
    again = given | {"branch": None, "states": first["states"].float()}
    if op == "attention_boundary":
        again["source_rstd"] = first["source_rstd"]
    second = run(kernels(op), name, again, BF16, BF16)
    assert all(torch.equal(first[key], second[key]) for key in ("x", "out", "out_mean", "out_rstd"))


def test_not_a_number_ends(kernels):
    """Such numbers spread, and the launch returns."""
    name = "attention_boundary_forward"
    given = numbers(name, T=5, D=33)
    expected = run(kernels("attention_boundary"), name, given, FP32, FP32)
    given["states"][8, 0], given["states"][10, 1] = torch.nan, torch.inf
    got = run(kernels("attention_boundary"), name, given, FP32, FP32)
    assert got["x"][:2].isnan().any(-1).all()
    assert torch.equal(got["x"][2:], expected["x"][2:])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_attention_over_no_states(dtype, kernels):
    given = numbers("attend_rows", T=3, D=17, sources=[], rows=[3, 4])
    got = run(kernels("attention_boundary"), "attend_rows", given, dtype, dtype)
    assert not got["out"][1:3].any()
    assert not got["out_stats"][1:3, 1].any()
    assert got["out_stats"][1:3, 0].isneginf().all()


def test_a_sum_of_which_no_state_was_there_so_far(kernels):
    stats, out = torch.full((3, 2, 5), 0.5), torch.randn(3, 5, 24)
    stats[1, 0], stats[1, 1], out[1] = -torch.inf, 0, 0
    given = {"out_stats": stats, "out": out, "accumulate": True, "rows": [16, 17]}
    agree(kernels, "attend_rows", BF16, T=5, D=24, **given)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_scores_of_minus_infinity_have_no_weight(dtype, kernels):
    bias = torch.zeros(ROWS, ROWS)
    bias[:, [0, 2]] = float("-inf")
    given = numbers("attend_rows", T=3, D=17, sources=[0, 1, 2, 3], rows=[5])
    got, expected = (
        run(kernels("attention_boundary"), "attend_rows", given | more, dtype, dtype)
        for more in ({"bias": bias}, {"bias": None, "sources": [1, 3]})
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("name", "factors"), [
    ("mix_rows", {"norm_weight": None, "norm_bias": None}),
    ("mix_rows", {}),
    ("pull_rows", {"norm_weight": None, "norm_bias": None}),
    ("pull_rows", {"norm_weight": 1e3}),
    ("pull_rows", {"norm_bias": 1e7}),
])  # fmt: skip
def test_large_fp16_states(name, factors, kernels):
    """Near the largest number, with weights that keep the results in its range; z may be beyond it.
    Source 0 is small beside the others."""
    affine = {"norm_weight": 1 + 0.5 * torch.randn(ROWS, 72), "norm_bias": torch.randn(ROWS, 72)}
    given = affine | {part: x and affine[part] * x for part, x in factors.items()}
    states = (3e4 * torch.randn(ROWS + 1, 5, 72)).clamp(-65504, 65504)
    states[0] *= 1e-7 if name == "pull_rows" else 1
    given |= {"states": states, "weight": 0.01 * torch.randn(ROWS, ROWS), "T": 5, "D": 72}
    given |= {"grads": "states"} if name == "pull_rows" else {}
    lists = {"sources": list(range(9)), "rows": list(range(9, 21))}
    got = agree(kernels, name, FP16, **lists, **given)
    assert all(result.isfinite().all() for result in got.values())


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_weights_keep_their_24_bits(dtype, kernels):
    """1 + 2^-20 minus 1: a weight that was rounded to 16 bits would leave 0."""
    like = torch.ones(3, 16, dtype=dtype)
    states = empty_slots(4, like).fill_(1)
    weight = torch.zeros(4, 4)
    weight[2, :2] = weight[2:, 0] = torch.tensor([1 + 2**-20, -1])
    expected, out = torch.full((3, 16), 2**-20), empty_slots(1, like, torch.float32)
    shared = {"states": states, "weight": weight, "out": out, "out_rows": [0], "accumulate": False}
    kernels("boundary").mix_rows(**shared, sources=[0, 1], rows=[2])
    assert torch.equal(out[0], expected)
    kernels("boundary").pull_rows(
        **shared, grads=states, grad_slots=[2, 3], rows=[2, 3], sources=[0]
    )
    assert torch.equal(out[0], expected)


# ---- lists that Triton takes -------------------------------------------------------------------


@pytest.mark.parametrize("lists", [
    {"near": [8, 9, 11, 12]}, {"pull_rows": [12, 13, 14, 16]}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("op", OPS)
def test_triton_takes_progressions(op, lists):
    module = pytest.importorskip(f"deepfast.kernels.{op}")
    name = f"{op}_backward"
    launches = SimpleNamespace(**{name: LAUNCHES[name].by_name(getattr(module, name))})
    with pytest.raises(ValueError, match=rf"{op}: (near|pull_rows) but k must be an arithmetic"):
        run(launches, name, numbers(name, T=3, D=17, **lists), FP32, FP32)


def test_every_pattern_gives_progressions():
    """Whatever row the backward pass begins at."""
    kernels = pytest.importorskip("deepfast.kernels.common")
    for indices in ([], [3], [3, 4], [1, 3, 5], [7, 4, 1]):
        first, step, count = kernels.progression(indices)
        assert [first + i * step for i in range(count)] == indices
    assert kernels.progression([0, 1, 5]) is None
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


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [1, 16, 17, 100, 512, 1024, 4096, 8192])
def test_tiles_of_layer_norm_hold_whole_rows(D, itemsize):
    kernels = pytest.importorskip("deepfast.kernels.layer_norm")
    for tile in (kernels.forward_tile(D, itemsize), kernels.backward_tile(D, itemsize)):
        channels = tile.BA * tile.BC
        assert D <= channels < max(32, 2 * D)
        assert tile.BT >= 1
        for fused in (False, True):
            programs, registers = kernels.backward_residency(tile, fused)
            assert programs * registers * 32 * tile.num_warps <= 65536


# ---- attention ---------------------------------------------------------------------------------

ONE_SENTENCE = {"T": 12, "Q": 12, "H": 2, "G": 2, "E": 16, "N": 2, "left": -1, "right": -1}
ONE_SENTENCE |= {"max_seqlen_q": 9, "max_seqlen_k": 9, "scale": 0.25, "dropout_p": 0.0}
ONE_SENTENCE |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 9, 12]).int())


def test_heads_that_are_no_slices(kernels):
    """Operands (H, T, d) in memory."""

    def heads_first(shape, dtype):
        return torch.empty(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)

    given = numbers("attention_forward", **ONE_SENTENCE)
    launches = kernels("attention")
    got = run(launches, "attention_forward", given, FP32, FP32, heads_first)
    expected = run(launches, "attention_forward", given, FP32, FP32)
    assert all(torch.equal(got[key], expected[key]) for key in got)


@pytest.mark.parametrize("BD", [16, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_of_attention_hold_what_the_launch_counts_on(BD, itemsize):
    attention = pytest.importorskip("deepfast.kernels.attention")
    lengths = (1, 16, 17, 32, 33, 64, 65, 128, 129, 1000)
    for launch_of in (attention.forward_launch, attention.backward_launch):
        for m, n in itertools.product(lengths, lengths):
            launch, whole_row = launch_of(m, n, BD, itemsize)
            assert not whole_row or n <= launch.BK
            assert all(s in (16, 32, 64, 128, 256) for s in launch[:2])
