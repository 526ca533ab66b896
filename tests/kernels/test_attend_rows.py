"""The far passes of attention residuals against the launchers of the reference in float64."""

import pytest
import torch

from deepfast import backend
from deepfast.depth.state import empty_slots
from deepfast.reference import launchers as reference

LOW = (torch.float32, torch.bfloat16, torch.float16)
WAYS = (torch.float32, torch.bfloat16)
KINDS = pytest.mark.parametrize("kind", ["softmax", "relu"])
SHAPES = [(0, 64), (1, 1), (5, 17), (33, 64), (5, 255), (3, 512)]
ROWS = 21


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


@pytest.fixture
def kernels():
    """Triton's launches; without a GPU in the interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return backend.choose("attention_boundary", "triton", device, torch.float32)[1]


def numbers(T, D, kind="softmax", bias=None):
    bias = kind == "relu" if bias is None else bias
    return {
        "states": torch.randn(ROWS + 1, T, D),
        "query": torch.randn(ROWS, D) / D**0.5,
        "bias": torch.randn(ROWS, ROWS) if bias else None,
        # The rows' statistics: the largest score, the sum, and <g, x>.
        "stats": torch.stack((3 + torch.rand(T), 1 + torch.rand(T), torch.randn(T))).repeat(
            ROWS, 1, 1
        ) if kind == "softmax" else None,
    }  # fmt: skip


def operands(given, storage, dtype):
    """States rounded to ``storage`` and then in ``dtype``, and 1 / RMS of them."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x = given["states"].to(storage).to(dtype)
    states = empty_slots(len(x), x[0]).copy_(x)
    rstd = (states[:ROWS].to(compute).square().mean(-1) + 1e-6).rsqrt().contiguous()
    small = (None if given[n] is None else given[n].to(compute) for n in ("query", "bias", "stats"))
    return states, rstd, *small


def agree(tolerances, kernels, run, given, dtype):
    tolerances.assert_all_accurate(
        run(kernels, *operands(given, dtype, dtype)),
        run(reference, *operands(given, dtype, dtype)),
        run(reference, *operands(given, dtype, torch.float64)),
        dtype,
    )


def attend(sources, rows, kind="softmax", accumulate=False):
    def run(launch, states, rstd, query, bias, _stats):
        count = len(rows)
        out = empty_slots(count + 1, states[0])
        stats = query.new_empty(count + 1, 2, states.shape[1]) if kind == "softmax" else None
        if accumulate:
            out[1:] = states[:count]
            if stats is not None:
                stats[1:] = torch.tensor([[0.3], [1.7]], dtype=query.dtype)
                # No states so far.
                out[1], stats[1, 0], stats[1, 1] = 0, float("-inf"), 0
        launch.attend_rows(
            states, list(sources), query, bias, kind, rstd, list(rows), out, stats,
            list(range(1, count + 1)), accumulate,
        )  # fmt: skip
        assert out[0].isnan().all()
        if stats is None:
            return {"out": out[1:]}
        assert stats[0].isnan().all()
        return {"out": out[1:], "most": stats[1:, 0], "total": stats[1:, 1]}

    return run


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend_rows(shape, dtype, kind, tolerances, kernels):
    run = attend(range(5), range(5, 9), kind)
    agree(tolerances, kernels, run, numbers(*shape, kind), dtype)


# A full history for more rows than a program holds, one source, and lists that are no progression.
LISTS = [
    (range(4), range(4, 20)),
    ([4], [4]),
    (range(1, 9, 4), [18, 20]),
    ([0, 1, 2, 5], [10, 11, 14]),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("sources", "rows"), LISTS)
@KINDS
def test_attend_rows_takes_any_list(kind, sources, rows, accumulate, bias, tolerances, kernels):
    run = attend(sources, rows, kind, accumulate)
    agree(tolerances, kernels, run, numbers(5, 24, kind, bias), torch.float32)


def test_attend_rows_over_no_states(kernels):
    states, rstd, query, _, _ = operands(numbers(3, 17), torch.float32, torch.float32)
    got = attend([], [3, 4])(kernels, states, rstd, query, None, None)
    assert not got["out"].any()
    assert not got["total"].any()
    assert got["most"].isneginf().all()


def test_scores_of_minus_infinity_have_no_weight(kernels):
    states, rstd, query, _, _ = operands(numbers(3, 17), torch.float32, torch.float32)
    bias = torch.zeros(ROWS, ROWS)
    bias[:, [0, 2]] = float("-inf")
    got = attend(range(4), [5])(kernels, states, rstd, query, bias, None)
    expected = attend([1, 3], [5])(kernels, states, rstd, query, None, None)
    for name in got:
        torch.testing.assert_close(got[name], expected[name])


def pull(sources, rows, kind="softmax", *, accumulate=False, inplace=True, grad=True):
    def run(launch, states, rstd, query, bias, stats):
        grads = states if inplace else states.flip(0)
        out = empty_slots(len(sources) + 1, states[0])
        if accumulate:
            out[1:] = states[: len(sources)]
        # The launch adds to dquery, and sets its own entries of dbias.
        dquery = torch.ones_like(query) if grad else None
        dbias = torch.empty_like(bias) if grad and bias is not None else None
        launch.attend_pull(
            grads, [row + inplace for row in rows], list(rows), states, list(sources), query, bias,
            kind, rstd, stats, out, list(range(1, len(sources) + 1)), accumulate, dquery, dbias,
        )  # fmt: skip
        assert out[0].isnan().all()
        results = {"out": out[1:], "dquery": dquery}
        if dbias is not None:
            results["dbias"] = dbias[list(rows)][:, list(sources)].clone()
            dbias[torch.tensor(list(rows))[:, None], torch.tensor(list(sources))] = torch.nan
            assert dbias.isnan().all()
        return {name: x for name, x in results.items() if x is not None}

    return run


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend_pull(shape, dtype, kind, tolerances, kernels):
    run = pull(range(3), range(4, 9), kind)
    agree(tolerances, kernels, run, numbers(*shape, kind), dtype)


@pytest.mark.parametrize("dtype", WAYS, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("sources", "rows"),
    [
        (range(16), range(16, 20)),
        (range(2), range(2, 20)),
        ([3], [4]),
        (range(0, 8, 3), range(8, 20, 4)),
        ([0, 1, 3], [4, 5, 9]),
    ],
)
@KINDS
def test_attend_pull_takes_any_list(kind, sources, rows, accumulate, dtype, tolerances, kernels):
    run = pull(sources, rows, kind, accumulate=accumulate)
    agree(tolerances, kernels, run, numbers(5, 24, kind), dtype)


@pytest.mark.parametrize("options", [{"inplace": False}, {"grad": False}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@KINDS
def test_attend_pull_with_optional_operands(kind, bias, options, tolerances, kernels):
    run = pull(range(4), range(4, 8), kind, **options)
    agree(tolerances, kernels, run, numbers(5, 40, kind, bias), torch.float32)


@pytest.mark.parametrize("run", [attend(range(6), range(6, 9)), pull(range(3), range(4, 9))])
def test_reruns_are_bit_identical(run, kernels):
    given = operands(numbers(33, 64), torch.bfloat16, torch.bfloat16)
    first, second = run(kernels, *given), run(kernels, *given)
    assert all(torch.equal(first[name], second[name]) for name in first)
