"""The kernels of depth_mix and of attention over depth: lists of any length, and options."""

import pytest
import torch

from tests.kernels.agreement import LOW, agree, apart

WAYS = (torch.float32, torch.bfloat16)
NO_NORM = {"norm": False} | dict.fromkeys(("norm_weight", "norm_bias", "mean", "rstd"))
NO_NORM |= {"dnorm_weight": None, "dnorm_bias": None}
QUERY = {"scores": None, "dscores": None}
SCORES = {"query": None, "dquery": None, "norm": False}
NO_SOFTMAX = SCORES | dict.fromkeys(("lse", "most", "total", "dlse"))


def both(tolerances, kernels, op, dtype, **given):
    """Forward and backward."""
    for direction in ("forward", "backward"):
        name, options = f"{op}_{direction}", dict(given)
        if op == "depth_attention" and options.get("most", 1) is None and direction == "backward":
            options["out"] = None
        agree(tolerances, kernels, name, dtype, **options)


@pytest.mark.parametrize("count", [1, 16, 17, 33, 121])
def test_takes_any_number_of_sources(count, tolerances, poison, kernels):
    """More than the arguments of one launch."""
    dtype = LOW[count % 3]
    both(tolerances, kernels, "depth_mix", dtype, T=3, D=20, lists=count)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", WAYS, ids=str)
@pytest.mark.parametrize("options", [
    NO_NORM,
    {"norm_weight": None, "dnorm_weight": None},
    {"norm_bias": None, "dnorm_bias": None},
    {"choice": 1},
    {"choice": 1} | NO_NORM,
    {"dweight": None, "dnorm_weight": None, "dnorm_bias": None},
    {"dsources": []},
], ids=str)  # fmt: skip
def test_depth_mix_with_optional_operands(options, dtype, tolerances, poison, kernels):
    both(tolerances, kernels, "depth_mix", dtype, T=5, D=40, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("given", [QUERY, SCORES, NO_SOFTMAX], ids=["query", "scores", "weights"])
@pytest.mark.parametrize(("count", "hops"), [(1, 1), (4, 3), (16, 1), (17, 2), (33, 1)])
def test_depth_attention(count, hops, given, dtype, tolerances, poison, kernels):
    sizes = {"T": 9, "D": 40, "H": hops, "lists": count}
    both(tolerances, kernels, "depth_attention", dtype, **sizes, **given)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", WAYS, ids=str)
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("options", [
    NO_SOFTMAX | {"dsources": []},
    QUERY | {"norm": False},
    QUERY | {"dlse": None},
    QUERY | {"dquery": None},
    QUERY | {"dsources": []},
    SCORES | {"dscores": None},
], ids=str)  # fmt: skip
def test_depth_attention_with_optional_operands(options, hops, dtype, tolerances, poison, kernels):
    given = {"T": 5, "D": 40, "H": hops} | options
    given |= {"out": None} if options.get("most", 1) is None else {}
    agree(tolerances, kernels, "depth_attention_backward", dtype, apart, **given)


@pytest.mark.parametrize("hops", [1, 2])
def test_sources_left_out(hops, kernels):
    """Scores of -inf in front, over more than one launch, are weights of zero."""
    x, scores = torch.randn(20, 4, 8), torch.randn(4, 20, hops)
    scores[:, :17] = -torch.inf
    out, (lse, most, total) = torch.empty(4 * hops, 8), torch.empty(3, 4, hops)
    results = {"out": out, "lse": lse, "most": most, "total": total}
    launch = kernels("depth_attention").depth_attention_forward
    launch(sources=list(x), scores=scores, norm=False, eps=1e-6, **results)
    exact = torch.einsum("tkh,ktd->thd", scores[:, 17:].softmax(1), x[17:])
    torch.testing.assert_close(out, exact.flatten(0, 1))
