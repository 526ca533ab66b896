"""deepfast.ops.depth_attention: scores and sources that are not ordinary, and merged results."""

import pytest
import torch

from deepfast.cases import ops
from deepfast.cases.case import Rows, differentiate
from deepfast.cases.ops import attend as plain_form
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


def scored(backend, scores, sources):
    """Results and gradients of attention by given scores."""

    def run(scores, **sources):
        sources = list(sources.values())
        if backend == "torch":
            return plain_form(sources, scores=scores)
        return depth_attention(sources, scores=scores, return_lse=True, backend=backend)

    leaves = {f"x{k}": x for k, x in sources.items()} | {"scores": scores}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    return differentiate(run, leaves, FP32)


def test_a_source_left_out(any_backend):
    """A score of -inf is a weight of zero, and has no gradient; also where more sources are left
    out than a launch takes."""
    sources = {k: torch.randn(6, 10) for k in range(20)}
    scores = torch.randn(6, 20, 2)
    scores[:, :17] = -torch.inf
    with_all = scored(any_backend, scores, sources)
    without = scored(any_backend, scores[:, 17:], {k: sources[k] for k in (17, 18, 19)})
    for name in without.keys() - {"operand scores", "d scores"}:
        torch.testing.assert_close(with_all[name], without[name], msg=name)
    torch.testing.assert_close(with_all["d scores"][:, 17:], without["d scores"])
    for gradient in (with_all["d x0"], with_all["d x16"], with_all["d scores"][:, :17]):
        assert gradient.eq(0).all()


@pytest.mark.parametrize(("hops", "place"), [((), 0), ((), 4), ((2,), 2)])
def test_a_score_of_infinity_is_nan(any_backend, hops, place):
    """Like torch.softmax: the result of its token is NaN, and no other."""
    sources, scores = {k: torch.randn(6, 10) for k in range(5)}, torch.randn(6, 5, *hops)
    scores[1, place] = torch.inf
    got, want = scored(any_backend, scores, sources), scored("torch", scores, sources)
    assert got["output 0"][1].isnan().all()
    for name in got.keys() - {"output 1"}:
        torch.testing.assert_close(got[name], want[name], equal_nan=True, msg=name)
    assert torch.equal(got["output 1"].isfinite(), want["output 1"].isfinite())


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
