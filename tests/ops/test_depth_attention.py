"""deepfast.ops.depth_attention: scores that are not ordinary."""

from functools import partial

import pytest
import torch

from deepfast.cases import ops
from deepfast.cases.case import Rows, differentiate, masked
from tests.ops.cases import assert_agrees

FP32 = torch.float32


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
    case = ops.depth_attention("", Rows((3,), 10), count, hops, scored=True)
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
