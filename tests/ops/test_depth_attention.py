"""deepfast.ops.depth_attention: scores and sources that are not ordinary, and merged results."""

from functools import partial

import pytest
import torch

from deepfast.cases import ops
from deepfast.cases.case import Rows, differentiate, masked
from deepfast.ops import depth_attention
from tests.ops.cases import assert_agrees

FP32, FP64 = torch.float32, torch.float64


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_scores_far_from_zero(backend, offset):
    """Only differences of scores count; each exponential alone would overflow or underflow."""
    case = ops.depth_attention("", Rows((4,), 16), 9, 2, scored=True)
    # In steps that fp32 represents exactly there too.
    scores = case.operands["scores"]
    scores.x = (scores.x * 8).round() / 8 + offset
    assert_agrees(case, backend)


INFINITE = [
    (20, 2, (slice(None), slice(17)), -torch.inf),
    *((5, hops, (1, place), torch.inf) for hops, place in ((None, 0), (None, 4), (2, 2))),
]


@pytest.mark.parametrize(("count", "hops", "at", "value"), INFINITE, ids=str)
def test_infinite_scores(any_backend, count, hops, at, value):
    """As with torch.softmax a score of -inf leaves a source out, also where these are more than a
    launch takes. One of inf makes the result of its token NaN, and no other."""
    case = ops.depth_attention("", Rows((6,), 10), count, hops, scored=True)
    case.operands["scores"].x[at] = value
    got, want = (
        differentiate(form, case.leaves(FP32, FP32), FP32)
        for form in (partial(case.run, backend=any_backend), partial(case.plain, masked))
    )
    lse, expected = got.pop("output 1"), want.pop("output 1")
    finite = expected.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    torch.testing.assert_close(lse[finite], expected[finite])
    torch.testing.assert_close(got, want, equal_nan=True)
    if value < 0:
        assert got["d x0"].eq(0).all()
        assert got["d scores"][at].eq(0).all()
    else:
        assert got["output 0"][1].isnan().all()


@pytest.mark.parametrize("hops", [(), (3,)])
def test_merged_results_are_those_of_all_sources(backend, hops):
    """Blocks of sources are computed alone and combined by their lse; values and gradients."""
    sources = [torch.randn(4, 6, dtype=FP64) for _ in range(7)]
    query, gain = torch.randn(*hops, 6, dtype=FP64), torch.rand(6, dtype=FP64)
    leaves = [x.requires_grad_() for x in (*sources, query, gain)]
    options = {"norm_weight": gain, "return_lse": True, "backend": backend}
    (a, lse_a), (b, lse_b) = (
        depth_attention(part, query, **options) for part in (sources[:3], sources[3:])
    )
    scores = torch.stack((lse_a, lse_b), -1)
    merged = depth_attention([a, b], scores=scores, return_lse=True, backend=backend)
    whole = depth_attention(sources, query, **options)
    torch.testing.assert_close(merged, whole)
    grads = [torch.randn_like(x) for x in whole]
    got = torch.autograd.grad(merged, leaves, grads)
    torch.testing.assert_close(got, torch.autograd.grad(whole, leaves, grads))
