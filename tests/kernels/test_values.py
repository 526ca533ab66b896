"""Launches with values that are not ordinary, and what they promise besides their numbers."""

import itertools
import math

import pytest
import torch

from deepfast.depth.schedule import Schedule, block_pattern, depth_pattern
from deepfast.ops.common import empty_slots
from tests.kernels.agreement import agree, numbers, reference_of, run, served
from tests.kernels.calls import ROWS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("V", [5, 600])
def test_logits_far_apart_and_not_finite(kernels, V):
    x = torch.zeros(6, V)
    x[0, 0], x[1, 1], x[2, :], x[3, 2] = 3e38, -3e38, -math.inf, math.nan
    x[4, 3], x[5, 1:] = math.inf, -math.inf
    target = torch.zeros(6, dtype=torch.int64)
    given = numbers("cross_entropy", T=6, V=V, logits=x, target=target, label_smoothing=0.0)
    of = "linear_cross_entropy"
    launches = kernels(of), reference_of(of)
    got, want = (run(by, "cross_entropy", given, FP32, FP32) for by in launches)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got["nll"].isnan().tolist() == [False, False, True, True, True, False]


def test_a_target_out_of_range_is_nan(kernels):
    """A device cannot raise; nothing outside the row is read or written."""
    wide = torch.full((5, 48), math.nan)
    wide[:, :40] = torch.randn(5, 40)
    loss, nll = torch.zeros(2, 5)
    kernels("linear_cross_entropy").cross_entropy(
        logits=wide[:, :40], target=torch.tensor([1, -1, 40, 1 << 40, 2]), label_smoothing=0.1,
        ignore_index=-7, write_grad=True, loss=loss, nll=nll,
    )  # fmt: skip
    assert loss.isnan().tolist() == nll.isnan().tolist() == [False, True, True, True, False]
    assert wide[:, 40:].isnan().all()


@pytest.mark.parametrize("name", ["peephole_lstm_forward", "peephole_lstm_backward"])
def test_a_length_out_of_range_is_the_nearest(kernels, name):
    given = numbers(name, P=2, N=4, H=8, reverse=True)
    got, want = (
        run(kernels("peephole_lstm"), name, given | {"lengths": torch.tensor(n)}, FP32, FP32)
        for n in ([-2, 0, 2, 9], [0, 0, 2, 2])
    )
    assert all(torch.equal(got[key], want[key]) for key in got)


# ---- over depth --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "op"),
    [
        (by, op)
        for by in ("triton", "cuda")
        for op in ("boundary", "attention_boundary")
        if served(by, f"{op}_forward")
    ],
    indirect=["kernels"],
)
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


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_states_without_weight(dtype, kernels):
    """No states; those whose scores are -inf; and a sum that had no state so far."""
    given = numbers("attend_rows", T=3, D=17, sources=[], rows=[3, 4])
    got = run(kernels("attention_boundary"), "attend_rows", given, dtype, dtype)
    assert not got["out"][1:3].any()
    assert not got["out_stats"][1:3, 1].any()
    assert got["out_stats"][1:3, 0].isneginf().all()
    bias = torch.zeros(ROWS, ROWS)
    bias[:, [0, 2]] = -math.inf
    given = numbers("attend_rows", T=3, D=17, sources=[0, 1, 2, 3], rows=[5])
    got, expected = (
        run(kernels("attention_boundary"), "attend_rows", given | more, dtype, dtype)
        for more in ({"bias": bias}, {"bias": None, "sources": [1, 3]})
    )
    torch.testing.assert_close(got, expected)
    stats, out = torch.full((3, 2, 5), 0.5), torch.randn(3, 5, 24)
    stats[1, 0], stats[1, 1], out[1] = -math.inf, 0, 0
    given = {"out_stats": stats, "out": out, "accumulate": True, "rows": [16, 17]}
    agree(kernels, "attend_rows", dtype, T=5, D=24, **given)
    for kind in ("softmax", "relu"):
        agree(kernels, "attend_pull", dtype, T=3, D=16, bias=bias, kind=kind)


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


def test_every_pattern_gives_progressions():
    """Triton takes no other lists. Whatever row the backward pass begins at."""
    progression = pytest.importorskip("deepfast.kernels.common").progression
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
                assert progression([i for i in indices if i != k]) is not None
    assert progression([0, 1, 5]) is None


def test_heads_that_are_no_slices(kernels):
    """Operands (H, T, d) in memory."""

    def heads_first(shape, dtype):
        return torch.empty(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)

    starts = torch.tensor([0, 9, 12]).int()
    given = numbers(
        "attention_forward", T=12, Q=12, H=2, G=2, E=16, N=2, cu_seqlens_q=starts,
        cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9, left=-1, right=-1, scale=0.25,
        dropout_p=0.0,
    )  # fmt: skip
    launches = kernels("attention")
    got = run(launches, "attention_forward", given, FP32, FP32, heads_first)
    expected = run(launches, "attention_forward", given, FP32, FP32)
    assert all(torch.equal(got[key], expected[key]) for key in got)
