"""The depth_attention kernels against the launchers of the reference in float64."""

import pytest
import torch

from deepfast import backend
from deepfast.reference import launchers as reference

LOW = (torch.float32, torch.bfloat16, torch.float16)
WAYS = (torch.float32, torch.bfloat16)
SHAPES = [(0, 64), (1, 1), (5, 17), (9, 64), (1, 255), (5, 512)]


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


@pytest.fixture
def kernels():
    """Triton's launches; without a GPU in the interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return backend.choose("depth_attention", "triton", device, torch.float32)[1]


def depth_attention(K, T, D, H=1, *, scored=False, softmax=True, norm=True, strided=False,
                    dlse=True, accumulate=False, source_grad=True, given_grad=True):  # fmt: skip
    given = {
        "sources": torch.randn(K, T, D),
        "query": None if scored else torch.randn(H, D) / D**0.5,
        "scores": torch.randn(T, K, H) if scored else None,
        "dout": torch.randn(T * H, D),
        "dlse": torch.randn(T, H) if dlse and softmax else None,
        "dsources": torch.randn(K, T, D),
    }

    def rows(dtype, shape, x=None):
        x = torch.empty(shape, dtype=dtype) if x is None else x.to(dtype)
        wide = torch.empty(shape[0], 2 * D, dtype=dtype)[:, :D]
        return wide.copy_(x) if strided else x

    def run(launch, storage, dtype):
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        sources = [rows(dtype, (T, D), x.to(storage)) for x in given["sources"]]
        query, scores, dlse = (
            None if given[name] is None else given[name].to(compute)
            for name in ("query", "scores", "dlse")
        )
        out = torch.empty(T * H, D, dtype=dtype)
        lse = most = total = None
        if softmax:
            lse, most, total = torch.empty(3, T, H, dtype=compute)
        operands = sources, query, scores, norm and not scored, 1e-6
        launch.depth_attention_forward(*operands, out, lse, most, total)
        results = {"out": out}
        if softmax:
            results |= {"lse": lse, "most": most, "total": total}
        dsources = [rows(dtype, (T, D)) for _ in sources] if source_grad else []
        if accumulate:
            dsources = [rows(dtype, (T, D), x.to(storage)) for x in given["dsources"]]
        dquery, dscores = (
            None if x is None or not given_grad else torch.empty_like(x) for x in (query, scores)
        )
        launch.depth_attention_backward(
            *operands, out if softmax else None, most, total,
            rows(dtype, (T * H, D), given["dout"].to(storage)), dlse, dsources, accumulate, dquery,
            dscores,
        )  # fmt: skip
        if source_grad:
            results["dsources"] = torch.stack(dsources)
        named = {"dquery": dquery, "dscores": dscores}
        return results | {name: grad for name, grad in named.items() if grad is not None}

    return run


def assert_agrees(kernels, run, dtype, tolerances):
    got, plain = run(kernels, dtype, dtype), run(reference, dtype, dtype)
    tolerances.assert_all_accurate(got, plain, run(reference, dtype, torch.float64), dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees(shape, dtype, tolerances, kernels):
    assert_agrees(kernels, depth_attention(3, *shape), dtype, tolerances)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("hops", [2, 3])
def test_several_hops(hops, scored, dtype, tolerances, kernels):
    run = depth_attention(4, 9, 40, hops, scored=scored)
    assert_agrees(kernels, run, dtype, tolerances)


@pytest.mark.parametrize(
    ("count", "hops", "dtype"),
    [
        (1, 1, torch.float16),
        (16, 1, torch.bfloat16),
        (17, 2, torch.bfloat16),
        (33, 1, torch.bfloat16),
    ],
)
def test_takes_any_number_of_sources(count, hops, dtype, tolerances, kernels):
    assert_agrees(kernels, depth_attention(count, 3, 20, hops), dtype, tolerances)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"scored": True},
        {"scored": True, "softmax": False},
        {"scored": True, "softmax": False, "H": 3},
        {"scored": True, "softmax": False, "H": 4, "accumulate": True, "K": 19},
        {"scored": True, "softmax": False, "strided": True, "source_grad": False},
        {"accumulate": True, "H": 2},
        {"norm": False},
        {"norm": False, "H": 2},
        {"strided": True},
        {"strided": True, "H": 2},
        {"dlse": False},
        {"given_grad": False, "H": 2},
        {"source_grad": False, "H": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_with_optional_operands(options, dtype, tolerances, kernels):
    sizes = {"K": 3, "T": 5, "D": 40}
    assert_agrees(kernels, depth_attention(**sizes | options), dtype, tolerances)


@pytest.mark.parametrize("hops", [1, 2])
def test_sources_left_out(hops, kernels):
    """Scores of -inf in front, over more than one launch, are weights of zero."""
    x = torch.randn(20, 4, 8)
    scores = torch.randn(4, 20, hops)
    scores[:, :17] = -torch.inf
    out = torch.empty(4 * hops, 8)
    kernels.depth_attention_forward(
        list(x), None, scores, False, 1e-6, out, *torch.empty(3, 4, hops)
    )
    exact = torch.einsum("tkh,ktd->thd", scores[:, 17:].softmax(1), x[17:])
    torch.testing.assert_close(out, exact.flatten(0, 1))


@pytest.mark.parametrize("hops", [1, 2])
def test_reruns_are_bit_identical(hops, kernels):
    run = depth_attention(3, 9, 40, hops)
    first, second = (run(kernels, torch.bfloat16, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
