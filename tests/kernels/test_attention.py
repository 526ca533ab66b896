"""Packed attention in Triton against its specification in float64."""

import pytest
import torch
import triton

from deepfast.kernels import attention
from deepfast.launches import LAUNCHES
from deepfast.reference import launchers as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, BACKWARD = (LAUNCHES[f"attention_{way}"].record for way in ("forward", "backward"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

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


class Problem:
    """Operands in float64 of one call, as views of the projections they come from."""

    def __init__(
        self, queries, keys, heads, width, causal, dropout_p, of_keys=None, window=(-1, -1)
    ):
        self.lengths, self.heads, self.width = (queries, keys), heads, width
        self.tokens = sum(queries), sum(keys)
        seqlens = [torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in self.lengths]
        longest = [max(n, default=0) for n in self.lengths]
        seed = torch.tensor(2**40 + 5, device=DEVICE) if dropout_p else None
        left, right = window
        sides = left, 0 if causal else right
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "left", "right",
                 "scale", "dropout_p", "seed")  # fmt: skip
        values = (*seqlens, *longest, *sides, width**-0.5, dropout_p, seed)
        self.common = dict(zip(names, values, strict=True))
        # The heads of q, k and v in one projection.
        self.split = heads, of_keys or heads, of_keys or heads
        self.projected = [torch.randn(t, sum(self.split), width).to(DEVICE) for t in self.tokens]
        self.do = torch.randn(self.tokens[0], heads, width).to(DEVICE)

    def forward(self, launch, dtype, storage):
        """o and lse of operands rounded to ``storage`` and given in ``dtype``."""
        q, k, v = self.operands(dtype, storage)
        o = torch.full((self.tokens[0], self.heads, self.width), torch.nan, dtype=dtype)
        lse = torch.full(o.shape[1::-1], torch.nan, dtype=torch.promote_types(dtype, torch.float32))
        o, lse = o.to(DEVICE), lse.to(DEVICE)
        launch(FORWARD(q=q, k=k, v=v, **self.common, o=o, lse=lse))
        return {"o": o, "lse": lse}

    def backward(self, launch, o, lse, dtype, storage):
        """Gradients, slices of one tensor like the operands, from this o and lse."""
        grads = [torch.full(x.shape, torch.nan, dtype=dtype, device=DEVICE) for x in self.projected]
        dq, rest = grads[0].split((self.heads, 2 * self.split[1]), 1)
        before, dk, dv = grads[1].split(self.split, 1)
        lse = lse.to(torch.promote_types(dtype, torch.float32))
        do = self.do.to(storage).to(dtype)
        given = dict(zip("qkv", self.operands(dtype, storage), strict=True))
        given |= {"o": o.to(dtype), "lse": lse, "dout": do, "dq": dq, "dk": dk, "dv": dv}
        launch(BACKWARD(**given, **self.common))
        # The memory between the slices belongs to other tensors.
        assert rest.isnan().all()
        assert before.isnan().all()
        return {"dq": dq, "dk": dk, "dv": dv}

    def operands(self, dtype, storage):
        queries, keys = (x.to(storage).to(dtype) for x in self.projected)
        return queries[:, : self.heads], *keys.split(self.split, 1)[1:]


def split_infinities(result, exact):
    """Without the -inf that lse has where, and only where, the exact one has it."""
    unseeing = exact["lse"] == -torch.inf
    assert torch.equal(result["lse"] == -torch.inf, unseeing)
    return result | {"lse": result["lse"].masked_fill(unseeing, 0)}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, dtype, tolerances):
    problem = Problem(*CASES[case])
    exact, plain, got = (
        problem.forward(module.attention_forward, d, dtype)
        for module, d in (
            (reference, torch.float64), (reference, dtype), (attention, dtype),
        )
    )  # fmt: skip
    tolerances.assert_all_accurate(
        *(split_infinities(result, exact) for result in (got, plain, exact)), dtype
    )
    # The exact gradient is that of the exact output; the others get the rounded one.
    exact, plain, got = (
        problem.backward(module.attention_backward, result["o"], result["lse"], d, dtype)
        for module, result, d in (
            (reference, exact, torch.float64), (reference, plain, dtype), (attention, plain, dtype),
        )
    )  # fmt: skip
    tolerances.assert_all_accurate(got, plain, exact, dtype)


@pytest.mark.parametrize(
    "case",
    ["one tile", "more queries than a tile", "129 keys", "groups", "groups, long",
     "causal window, long"],
)  # fmt: skip
def test_two_runs_are_the_same_to_the_bit(case):
    problem = Problem(*CASES[case])
    runs = []
    for _ in range(2):
        run = problem.forward(attention.attention_forward, torch.float16, torch.float16)
        run |= problem.backward(
            attention.attention_backward, run["o"], run["lse"], torch.float16, torch.float16
        )
        runs.append(run)
    for name, first in runs[0].items():
        assert torch.equal(first, runs[1][name]), name


def test_large_scores_do_not_overflow(tolerances):
    problem = Problem([5, 40], [5, 40], 1, 16, True, 0.0)
    for x in problem.projected:
        x *= 40
    results, grads = [], []
    for module, dtype in (
        (attention, torch.float32), (reference, torch.float32), (reference, torch.float64),
    ):  # fmt: skip
        result = problem.forward(module.attention_forward, dtype, torch.float32)
        results.append(result)
        grads.append(
            problem.backward(
                module.attention_backward, result["o"], result["lse"], dtype, torch.float32
            )
        )
    tolerances.assert_all_accurate(*results, torch.float32)
    tolerances.assert_all_accurate(*grads, torch.float32)


def test_heads_that_are_no_slices():
    """Operands (H, T, d) in memory, and a gradient per operand."""
    problem = Problem([9, 3], [9, 3], 2, 16, False, 0.0)
    q, k, v = problem.operands(torch.float32, torch.float32)
    expected = problem.forward(attention.attention_forward, torch.float32, torch.float32)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    o, lse = torch.empty_like(expected["o"]), torch.empty_like(expected["lse"])
    attention.attention_forward(FORWARD(q=q, k=k, v=v, **problem.common, o=o, lse=lse))
    assert torch.equal(o, expected["o"])
    assert torch.equal(lse, expected["lse"])


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
