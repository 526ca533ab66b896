"""The kernels of the far passes: lists of any kind, options, and large numbers."""

import pytest
import torch

from deepfast.ops.common import empty_slots
from tests.kernels.agreement import LOW, agree, numbers, run

MIX, PULL = ("mix_rows", "attend_rows"), ("pull_rows", "attend_pull")
# One for each of the two ways to multiply; fp16 uses that of fp32.
WAYS = (torch.float32, torch.bfloat16)
ROWS = 21
NO_NORM = {"norm_weight": None, "norm_bias": None}


def lists(name, sources, rows, inplace=True):
    sources, rows = list(sources), list(rows)
    written = rows if name in MIX else sources
    given = {"R": ROWS, "S": ROWS + 1, "B": len(written) + 1, "sources": sources, "rows": rows}
    given["out_rows"] = list(range(1, len(written) + 1))
    if name in PULL:
        given["grad_slots"] = [row + inplace for row in rows]
        given |= {"grads": "states"} if inplace and name == "pull_rows" else {}
    if name in ("attend_rows", "attend_pull"):
        given["source_rstd"] = 0.5 + torch.rand(ROWS, given.get("T", 5))
    return given


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("name", "sources", "rows"), [
    *((name, *given) for name in MIX for given in (
        (range(13), range(13, 18)), (range(4), range(4, 20)), ([4], [4]),
        (range(1, 18, 4), [18, 20]), ([0, 1, 2, 5, 6, 9], [10, 11, 14]),
    )),
    ("mix_rows", [], [3, 4]),
    *((name, *given) for name in PULL for given in (
        (range(9), range(9, 21)), (range(16), range(16, 20)), ([3], [4]),
        (range(0, 8, 3), range(8, 20, 2)), ([0, 1, 3], [4, 5, 9, 10, 18]),
        ([2, 1, 0], [9, 8, 7]),
    )),
])  # fmt: skip
@pytest.mark.each_value
def test_takes_any_list(name, sources, rows, accumulate, dtype, tolerances, poison, kernels):
    given = lists(name, sources, rows) | {"T": 5, "D": 24, "accumulate": accumulate}
    if accumulate:
        given["out"] = torch.randn(given["B"], 5, 24)
    if name == "attend_rows":
        # Of the first row no state was there so far.
        stats = torch.tensor([[0.3], [1.7]]).repeat(given["B"], 1, 5)
        stats[1, 0], stats[1, 1] = float("-inf"), 0
        given["out_stats"] = stats
        if accumulate:
            given["out"][1] = 0
    agree(tolerances, kernels, name, dtype, **given)


RELU = {"kind": "relu", "stats": None, "out_stats": None}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", WAYS, ids=str)
@pytest.mark.parametrize(("names", "options"), [
    (("mix_rows", "pull_rows"), {"norm_weight": None}),
    (("mix_rows", "pull_rows"), {"norm_bias": None}),
    (("mix_rows", "pull_rows"), NO_NORM),
    (("mix_rows", "pull_rows"), {"choice": 1}),
    (("mix_rows", "pull_rows"), {"choice": 1} | NO_NORM),
    (("pull_rows",), {"dweight": None}),
    (("pull_rows",), {"dweight": None, "choice": 1}),
    (("attend_rows", "attend_pull"), RELU),
    (("attend_rows", "attend_pull"), RELU | {"bias": None, "dbias": None}),
    (("attend_rows", "attend_pull"), {"bias": None, "dbias": None}),
    (("attend_pull",), {"dquery": None, "dbias": None}),
    (("attend_pull",), RELU | {"dquery": None, "dbias": None}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("inplace", [False, True])
def test_options(names, options, inplace, dtype, tolerances, poison, kernels):
    for name in names:
        given = lists(name, range(4), range(4, 12), inplace)
        agree(tolerances, kernels, name, dtype, T=5, D=40, **given, **options)


@pytest.mark.parametrize("kind", [{}, RELU], ids=["softmax", "relu"])
@pytest.mark.parametrize("D", [64, 200, 1000, 1030])
def test_tiles_of_attention(D, kind, tolerances, poison, kernels):
    """More states or rows than a tile of 16, rows in one turn, in two and too wide for tensor
    cores, more tokens than programs."""
    for name, count in (("attend_rows", 19), ("attend_pull", 2)):
        given = lists(name, range(count), range(count, ROWS), False) | {"T": 9, "D": D}
        given["source_rstd"] = 0.5 + torch.rand(ROWS, 9)
        agree(tolerances, kernels, name, torch.bfloat16, **given | kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_rows_over_no_states(dtype, kernels):
    given = numbers("attend_rows", T=3, D=17, sources=[], rows=[3, 4], out_rows=[1, 2])
    got = run(kernels("attention_boundary"), "attend_rows", given, dtype, dtype)
    assert not got["out"][1:3].any()
    assert not got["out_stats"][1:3, 1].any()
    assert got["out_stats"][1:3, 0].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_minus_infinity_have_no_weight(dtype, kernels):
    bias = torch.zeros(ROWS, ROWS)
    bias[:, [0, 2]] = float("-inf")
    given = lists("attend_rows", range(4), [5]) | {"source_rstd": 0.5 + torch.rand(ROWS, 3)}
    given = numbers("attend_rows", T=3, D=17, **given)
    got, expected = (
        run(kernels("attention_boundary"), "attend_rows", given | more, dtype, dtype)
        for more in ({"bias": bias}, {"bias": None, "sources": [1, 3]})
    )
    torch.testing.assert_close(got, expected)


def large(D, *, affine=True):
    """Near the largest number of fp16, with weights that keep the results in its range."""
    given = {
        "states": (3e4 * torch.randn(ROWS + 1, 5, D)).clamp(-65504, 65504),
        "weight": 0.01 * torch.randn(ROWS, ROWS), "T": 5, "D": D,
        "norm_weight": 1 + 0.5 * torch.randn(ROWS, D), "norm_bias": torch.randn(ROWS, D),
    }  # fmt: skip
    return given if affine else given | NO_NORM


@pytest.mark.parametrize("affine", [False, True])
def test_mix_rows_of_large_fp16_states(affine, tolerances, kernels):
    given = lists("mix_rows", range(13), range(5, 21)) | large(64, affine=affine)
    got = agree(tolerances, kernels, "mix_rows", torch.float16, **given)
    assert got["out"].isfinite().all()


@pytest.mark.parametrize("larger", [None, "norm_weight", "norm_bias"])
def test_pull_rows_of_large_fp16_states(larger, tolerances, kernels):
    """With z beyond the largest number and the results in its range. Source 0 is small beside the
    others."""
    given = lists("pull_rows", range(9), range(9, 21)) | large(72, affine=larger is not None)
    given["states"][0] *= 1e-7
    if larger is not None:
        given[larger] = given[larger] * (1e3 if larger == "norm_weight" else 1e7)
    got = agree(tolerances, kernels, "pull_rows", torch.float16, **given)
    assert all(result.isfinite().all() for result in got.values())


@pytest.mark.parametrize("dtype", LOW)
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
