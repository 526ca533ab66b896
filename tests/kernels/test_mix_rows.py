"""The engine's far passes against the launchers of the reference in float64."""

import pytest
import torch

from deepfast.depth.state import empty_slots
from deepfast.reference import launchers as reference

OP = "boundary"
LOW = (torch.float32, torch.bfloat16, torch.float16)
# One for each of the two ways to multiply; fp16 uses that of fp32 in Triton, that of bf16 in CUDA.
WAYS = (torch.float32, torch.bfloat16)
# The last has several tiles for every program, which then adds to its own partial sums.
SHAPES = [(0, 64), (1, 1), (5, 17), (17, 64), (5, 100), (1, 255), (17, 512)]
# A full history, one source, a window, dilation, and lists that are no progression.
LISTS = [
    (range(13), range(13, 18)),
    ([4], [4]),
    (range(7, 12), [12]),
    (range(1, 18, 4), [18, 20]),
    ([0, 1, 2, 5, 6, 9], [10, 11, 14]),
    ([], [3, 4]),
]
ROWS = 21


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


def numbers(T, D, *, affine=True, per_channel=False):
    """Weights, states, norm_weights and norm_biases in fp32; a launcher's states are rounded."""
    return {
        "states": torch.randn(ROWS + 1, T, D),
        "weight": torch.randn((ROWS, ROWS, D) if per_channel else (ROWS, ROWS)),
        "norm_weight": 1 + 0.5 * torch.randn(ROWS, D) if affine else None,
        "norm_bias": torch.randn(ROWS, D) if affine else None,
    }


def stored(x, dtype):
    """Slots as the engine lays them out, with the numbers x rounded to ``dtype``."""
    return empty_slots(len(x), x[0].to(dtype)).copy_(x.to(dtype))


def operands(given, storage, dtype):
    """``given`` for a launcher: states rounded to ``storage``, all in ``dtype`` and its partner."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    states = stored(given["states"].to(storage), dtype)
    return states, *(
        None if given[name] is None else given[name].to(compute)
        for name in ("weight", "norm_weight", "norm_bias")
    )


def three_ways(kernels, run, given, dtype):
    """Results of the kernels, of the reference in ``dtype`` and of the reference in float64."""
    return (
        run(kernels, *operands(given, dtype, dtype)),
        run(reference, *operands(given, dtype, dtype)),
        run(reference, *operands(given, dtype, torch.float64)),
    )


def mix(sources, rows, accumulate):
    def run(launch, states, weight, norm_weight, norm_bias):
        out = empty_slots(len(rows) + 1, states[0])
        out_rows = list(range(1, len(rows) + 1))
        if accumulate:
            out[1:] = states[: len(rows)]
        lists = list(sources), weight, list(rows)
        launch.mix_rows(states, *lists, norm_weight, norm_bias, out, out_rows, accumulate)
        assert out[0].isnan().all()
        return {"out": out[1:]}

    return run


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", SHAPES)
def test_mix_rows(shape, dtype, tolerances, kernels):
    given = numbers(*shape)
    results = three_ways(kernels, mix(range(13), range(13, 18), False), given, dtype)
    tolerances.assert_all_accurate(*results, dtype)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize(("sources", "rows"), LISTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_mix_rows_takes_any_list(sources, rows, accumulate, dtype, tolerances, kernels):
    results = three_ways(kernels, mix(sources, rows, accumulate), numbers(5, 24), dtype)
    tolerances.assert_all_accurate(*results, dtype)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize("absent", [("norm_weight",), ("norm_bias",), ("norm_weight", "norm_bias")])
@pytest.mark.parametrize("per_channel", [False, True])
def test_mix_rows_with_optional_operands(absent, per_channel, dtype, tolerances, kernels):
    given = numbers(5, 40, per_channel=per_channel) | dict.fromkeys(absent)
    results = three_ways(kernels, mix(range(3), range(3, 20), False), given, dtype)
    tolerances.assert_all_accurate(*results, dtype)


@pytest.mark.parametrize("affine", [False, True])
def test_mix_rows_of_large_fp16_states(affine, tolerances, kernels):
    """Near the largest number of fp16, with weights that keep the results in its range."""
    given = numbers(5, 64, affine=affine)
    given["states"] = (3e4 * given["states"]).clamp(-65504, 65504)
    given["weight"] = 0.01 * given["weight"]
    results = three_ways(kernels, mix(range(13), range(5, 21), False), given, torch.float16)
    assert results[0]["out"].isfinite().all()
    tolerances.assert_all_accurate(*results, torch.float16)


def pull(sources, rows, *, accumulate=False, inplace=True, weight_grad=True):
    def run(launch, states, weight, norm_weight, norm_bias):
        grads = states if inplace else states.flip(0)
        out = empty_slots(len(sources) + 1, states[0])
        if accumulate:
            out[1:] = states[: len(sources)]
        dweight = torch.empty_like(weight) if weight_grad else None
        launch.pull_rows(
            grads, [row + inplace for row in rows], list(rows), states, list(sources), weight,
            norm_weight, norm_bias, out, list(range(1, len(sources) + 1)), accumulate, dweight,
        )  # fmt: skip
        assert out[0].isnan().all()
        results = {"out": out[1:]}
        if weight_grad:
            results["dweight"] = dweight[list(rows)][:, list(sources)].clone()
            written = torch.zeros(weight.shape[:2], dtype=torch.bool)
            written[torch.tensor(list(rows))[:, None], torch.tensor(list(sources))] = True
            assert dweight[~written].isnan().all()
        return results

    return run


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", SHAPES)
def test_pull_rows(shape, dtype, tolerances, kernels):
    results = three_ways(kernels, pull(range(3), range(4, 21)), numbers(*shape), dtype)
    tolerances.assert_all_accurate(*results, dtype)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("sources", "rows"),
    [
        (range(9), range(9, 21)),
        ([3], [4]),
        (range(0, 8, 3), range(8, 20, 2)),
        ([0, 1, 3], [4, 5, 9, 10, 18]),
        ([2, 1, 0], [9, 8, 7]),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_pull_rows_takes_any_list(sources, rows, accumulate, dtype, tolerances, kernels):
    run = pull(sources, rows, accumulate=accumulate)
    tolerances.assert_all_accurate(*three_ways(kernels, run, numbers(5, 24), dtype), dtype)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize("absent", [("norm_weight",), ("norm_bias",), ("norm_weight", "norm_bias")])
@pytest.mark.parametrize("per_channel", [False, True])
def test_pull_rows_with_optional_operands(absent, per_channel, dtype, tolerances, kernels):
    given = numbers(5, 40, per_channel=per_channel) | dict.fromkeys(absent)
    run = pull(range(4), range(4, 12), inplace=False)
    tolerances.assert_all_accurate(*three_ways(kernels, run, given, dtype), dtype)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_pull_rows_without_weight_gradient(per_channel, dtype, tolerances, kernels):
    run = pull(range(4), range(4, 12), weight_grad=False)
    results = three_ways(kernels, run, numbers(5, 40, per_channel=per_channel), dtype)
    tolerances.assert_all_accurate(*results, dtype)


@pytest.mark.parametrize("larger", [None, "norm_weight", "norm_bias"])
def test_pull_rows_of_large_fp16_states(larger, tolerances, kernels):
    """Near the largest number of fp16, with z beyond it and the results in its range. Source 0 is
    small beside the others."""
    given = numbers(5, 72, affine=larger is not None)
    given["states"][1:] = (3e4 * given["states"][1:]).clamp(-65504, 65504)
    given["states"][0] *= 1e-3
    given["weight"] = 0.01 * given["weight"]
    if larger is not None:
        given[larger] = given[larger] * (1e3 if larger == "norm_weight" else 1e7)
    results = three_ways(kernels, pull(range(9), range(9, 21)), given, torch.float16)
    assert all(result.isfinite().all() for result in results[0].values())
    tolerances.assert_all_accurate(*results, torch.float16)


@pytest.mark.parametrize("dtype", LOW)
def test_weights_keep_their_24_bits(dtype, kernels):
    """1 + 2^-20 minus 1: a weight that was rounded to 16 bits would leave 0."""
    states = stored(torch.ones(4, 3, 16), dtype)
    weight = torch.zeros(4, 4)
    weight[2, :2] = weight[2:, 0] = torch.tensor([1 + 2**-20, -1])
    expected = torch.full((3, 16), 2**-20).to(dtype)
    out = empty_slots(1, states[0])
    kernels.mix_rows(states, [0, 1], weight, [2], None, None, out, [0], False)
    assert torch.equal(out[0], expected)
    kernels.pull_rows(
        states, [2, 3], [2, 3], states, [0], weight, None, None, out, [0], False, None
    )
    assert torch.equal(out[0], expected)


@pytest.mark.parametrize(
    "run", [mix(range(13), range(13, 18), False), pull(range(3), range(4, 21))]
)
def test_reruns_are_bit_identical(run, kernels):
    given = operands(numbers(17, 100), torch.bfloat16, torch.bfloat16)
    first, second = run(kernels, *given), run(kernels, *given)
    assert all(torch.equal(first[name], second[name]) for name in first)
