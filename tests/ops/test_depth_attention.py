"""deepfast.ops.depth_attention against float64, on every backend."""

import pytest
import torch

from deepfast.cases import ops
from deepfast.cases.case import Rows, differentiate
from deepfast.cases.ops import attend as plain_form
from deepfast.ops import depth_attention
from tests.ops.cases import assert_agrees


def operands(count, shape, hops, mode):
    """Sources, and the operands of their scores; their spread is about that of training."""
    *lead, dim = shape
    many = () if hops is None else (hops,)
    sources = [torch.randn(shape) * (1 + k % 3) + k % 2 for k in range(count)]
    if mode == "scores":
        return sources, {"scores": torch.randn(*lead, count, *many)}
    given = {"query": torch.randn(*many, dim) / dim**0.5}
    if mode == "gain":
        given["norm_weight"] = 1 + 0.3 * torch.randn(dim)
    return sources, given


def by_scores(backend):
    def run(scores, **sources):
        sources = list(sources.values())
        return depth_attention(sources, scores=scores, return_lse=True, backend=backend)

    return run


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_scores_far_from_zero(exact_backend, offset):
    """Only differences of scores count; each exponential alone would overflow or underflow."""
    case = ops.depth_attention("", Rows((4,), 16), 9, 2, scored=True)
    # In steps that fp32 represents exactly there too.
    scores = case.operands["scores"]
    scores.x = (scores.x * 8).round() / 8 + offset
    assert_agrees(case, exact_backend)


@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_extreme_sources(exact_backend, scale):
    """With an eps that fits them, the weights are those of the sources without the scale."""
    sources, given = operands(5, (8, 70), 2, "gain")
    got = depth_attention([s * scale for s in sources], **given, eps=1e-36, backend=exact_backend)
    exact = plain_form([s.double() for s in sources], **{n: x.double() for n, x in given.items()})
    torch.testing.assert_close(got.double() / scale, exact[0], rtol=1e-5, atol=1e-5)


def test_a_source_left_out(exact_backend):
    """A score of -inf is a weight of zero, and has no gradient."""
    sources, given = operands(5, (6, 10), 2, "scores")
    given["scores"][:, :2] = -torch.inf
    found = []
    for first in (0, 2):
        leaves = {f"x{k}": s for k, s in enumerate(sources)}
        leaves = {name: leaves[name].clone() for name in list(leaves)[first:]}
        leaves["scores"] = given["scores"][:, first:].clone()
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        found.append(differentiate(by_scores(exact_backend), leaves, torch.float32))
    with_all, without = found
    for name in without.keys() - {"operand scores", "d scores"}:
        torch.testing.assert_close(with_all[name], without[name], msg=name)
    torch.testing.assert_close(with_all["d scores"][:, 2:], without["d scores"])
    for name in ("d x0", "d x1"):
        assert with_all[name].eq(0).all()
    assert with_all["d scores"][:, :2].eq(0).all()


@pytest.mark.parametrize("hops", [None, 2])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_score_of_infinity_is_nan(exact_backend, hops, place):
    """Like torch.softmax: the result of its token is NaN, and no other."""
    sources, given = operands(5, (6, 10), hops, "scores")
    given["scores"][1, place] = torch.inf

    leaves = {f"x{k}": s for k, s in enumerate(sources)} | given
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}

    def plain(scores, **sources):
        return plain_form(sources.values(), scores=scores)

    forms = by_scores(exact_backend), plain
    got, want = (differentiate(form, leaves, torch.float32) for form in forms)
    assert got["output 0"][1].isnan().all()
    for name in got.keys() - {"output 1"}:
        torch.testing.assert_close(got[name], want[name], equal_nan=True, msg=name)
    assert torch.equal(got["output 1"].isfinite(), want["output 1"].isfinite())


@pytest.mark.parametrize("hops", [None, 3])
def test_merged_results_are_those_of_all_sources(exact_backend, hops):
    """Blocks of sources are computed alone and combined by their lse; values and gradients."""
    sources, given = operands(7, (4, 6), hops, "gain")
    leaves = [t.double().requires_grad_() for t in (*sources, *given.values())]
    query, gain = leaves[7:]

    def attend(part):
        return depth_attention(
            part, query, norm_weight=gain, return_lse=True, backend=exact_backend
        )

    (a, lse_a), (b, lse_b) = attend(leaves[:3]), attend(leaves[3:7])
    scores = torch.stack((lse_a, lse_b), -1)
    merged, lse = depth_attention([a, b], scores=scores, return_lse=True, backend=exact_backend)
    whole, whole_lse = attend(leaves[:7])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)
    dout, dlse = torch.randn_like(whole), torch.randn_like(lse)
    got = torch.autograd.grad((merged, lse), leaves, (dout, dlse))
    exact = torch.autograd.grad((whole, whole_lse), leaves, (dout, dlse))
    torch.testing.assert_close(got, exact)
