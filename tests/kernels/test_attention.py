"""Packed attention in Triton against its specification in float64."""

import pytest
import torch
import triton

from deepfast import backend
from deepfast.kernels import attention
from tests.kernels.agreement import LOW, agree, apart, numbers, plain, run

FORWARD, BACKWARD = "attention_forward", "attention_backward"
FP32, FP16 = torch.float32, torch.float16

# (queries, keys) of the sentences, heads, head width, causal, dropout, and then where they are not
# the plain ones: heads of the keys, and the window, with -1 for a side without end. Between them
# every path: whole rows in one tile and by tiles of queries, and longer rows, in all dtypes.
CASES = {
    "short": ([3, 0, 17, 1], [3, 0, 17, 1], 2, 16, False, 0.0),
    "causal, odd width": ([3, 0, 17, 1], [3, 0, 17, 1], 2, 17, True, 0.3),
    "cross": ([3, 5, 0, 20], [4, 0, 5, 7], 3, 32, False, 0.1),
    "cross, causal": ([3, 5, 0, 20], [4, 0, 5, 7], 1, 1, True, 0.0),
    "one tile": ([63, 2], [63, 64], 1, 64, True, 0.1),
    "128 keys": ([128, 17], [128, 17], 1, 64, False, 0.3),
    "more queries than a tile": ([130, 10], [33, 20], 1, 32, True, 0.5),
    "129 keys": ([129, 1, 0], [129, 5, 3], 1, 16, True, 0.2),
    "long, cross": ([17, 150], [200, 0], 1, 16, False, 0.1),
    "long, fewer keys": ([200], [150], 1, 16, True, 0.1),
    "wide": ([20, 33], [20, 33], 1, 128, False, 0.1),
    "no sentence": ([], [], 2, 16, True, 0.1),
    "no query": ([0, 0], [3, 2], 2, 16, False, 0.1),
    "no query, long": ([0], [130], 1, 16, False, 0.1),
    "no key": ([3, 2], [0, 0], 2, 16, True, 0.0),
    "groups": ([3, 0, 17, 1], [3, 0, 17, 1], 4, 16, False, 0.3, 2),
    "one head of keys": ([40, 5], [40, 5], 3, 17, True, 0.1, 1),
    "groups, cross": ([3, 5, 0, 20], [4, 0, 5, 7], 6, 32, True, 0.1, 3),
    "groups, more queries than a tile": ([130, 10], [33, 20], 2, 32, True, 0.5, 1),
    "groups, long": ([150, 1, 0], [150, 5, 3], 4, 16, True, 0.2, 2),
    "window": ([5, 40, 0, 1], [5, 40, 0, 1], 2, 16, False, 0.3, 2, (3, 2)),
    "two keys": ([5, 40], [5, 40], 1, 8, False, 0.0, 1, (1, 0)),
    "window, cross": ([3, 5, 0, 20], [4, 0, 50, 7], 1, 16, False, 0.1, 1, (2, 1)),
    "causal window, long": ([300, 20], [300, 20], 2, 16, True, 0.2, 1, (40, -1)),
    "window, long": ([200], [200], 1, 16, False, 0.1, 1, (3, 70)),
    "one side, long": ([200, 7], [200, 7], 1, 16, False, 0.0, 1, (5, -1)),
    "other side, long": ([200, 7], [200, 7], 1, 16, False, 0.0, 1, (-1, 5)),
    "window, long, fewer queries": ([20, 33], [300, 150], 2, 16, True, 0.1, 1, (70, -1)),
    "window, long, fewer keys": ([300, 140], [150, 3], 1, 16, False, 0.1, 1, (10, 10)),
    "window past the sentences": ([140], [140], 1, 16, False, 0.0, 1, (139, 200)),
}


def begins(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(queries, keys, heads, width, causal, dropout_p, of_keys=None, window=(-1, -1)):
    """Sizes and operands of both launches, but not o and lse."""
    given = {"T": sum(queries), "Q": sum(keys), "N": len(queries), "E": width, "H": heads}
    given |= {"G": of_keys or heads, "scale": width**-0.5, "dropout_p": dropout_p}
    given |= {"cu_seqlens_q": begins(queries), "cu_seqlens_k": begins(keys)}
    given |= {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}
    given |= {"left": window[0], "right": 0 if causal else window[1]}
    T, Q, H, G, E = (given[size] for size in "TQHGE")
    return given | {"q": torch.randn(T, H, E), "k": torch.randn(Q, G, E), "v": torch.randn(Q, G, E)}


def agrees(tolerances, dtype, given, layout=plain):
    """Forward, and backward from the o and lse of the reference."""
    agree(tolerances, triton_launches, FORWARD, dtype, layout, **given)
    given = with_results(given, dtype)
    agree(tolerances, triton_launches, BACKWARD, dtype, layout, **given)


def with_results(given, dtype):
    reference = backend.choose("attention", "reference", "cpu", FP32)[1]
    return given | run(reference, FORWARD, numbers(FORWARD, **given), dtype, dtype)


def triton_launches(op="attention"):
    return backend.choose(op, "triton", "cpu", FP32)[1]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("layout", [plain, apart])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, layout, dtype, tolerances, poison):
    agrees(tolerances, dtype, operands(*CASES[case]), layout)


FEW = "one tile", "more queries than a tile", "129 keys", "groups", "groups, long"


@pytest.mark.parametrize("case", [*FEW, "causal window, long"])
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_two_runs_are_the_same_to_the_bit(name, case):
    given = numbers(name, **with_results(operands(*CASES[case]), FP16))
    first, second = (run(triton_launches(), name, given, FP16, FP16) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_large_scores_do_not_overflow(tolerances):
    given = operands([5, 40], [5, 40], 1, 16, True, 0.0)
    agrees(tolerances, FP32, given | {name: 8 * given[name] for name in "qkv"})


def test_heads_that_are_no_slices():
    """Operands (H, T, d) in memory."""

    def heads_first(shape, dtype):
        return torch.empty(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)

    given = numbers(FORWARD, **operands([9, 3], [9, 3], 2, 16, False, 0.0))
    got, expected = (
        run(triton_launches(), FORWARD, given, FP32, FP32, layout)
        for layout in (heads_first, plain)
    )
    assert all(torch.equal(got[key], expected[key]) for key in got)


@pytest.mark.parametrize("BD", [16, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_what_the_launch_counts_on(BD, itemsize):
    lengths = (1, 16, 17, 32, 33, 64, 65, 128, 129, 1000)
    for launch_of in (attention.forward_launch, attention.backward_launch):
        for m in lengths:
            for n in lengths:
                launch, whole_row = launch_of(m, n, BD, itemsize)
                assert not whole_row or n <= launch.BK
                assert all(s >= 16 and triton.next_power_of_2(s) == s for s in launch[:2])
