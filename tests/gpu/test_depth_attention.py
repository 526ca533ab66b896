"""depth_attention on a GPU."""

import pytest
import torch

from deepfast import ops

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if torch.cuda.is_available():
    SHAPES, ODD = [(4096, 512), (1024, 1024)], [(1023, 255), (0, 512), (1, 8), (65, 8192)]
    COUNT, MANY = 7, 35
else:
    SHAPES, ODD, COUNT, MANY = [(5, 32)], [(3, 17), (0, 16)], 3, 17


@pytest.fixture
def by(device):
    pytest.importorskip("triton")
    return "triton"


def inputs(twins, count, T, D, hops=1, scored=False, apart=0):
    given = {f"x{k}": twins.Stored(torch.randn(T, D), apart) for k in range(count)}
    if scored:
        return given | {"scores": twins.Computed(torch.randn(T, count, hops))}
    return given | {
        "query": twins.Computed(torch.randn(hops, D) / D**0.5),
        "norm_weight": twins.Computed(1 + 0.3 * torch.randn(D)),
    }


def attend(backend, query=None, scores=None, norm_weight=None, **sources):
    return ops.depth_attention(
        list(sources.values()), query, scores=scores, norm_weight=norm_weight, return_lse=True,
        backend=backend,
    )  # fmt: skip


def check(tolerances, twins, given, dtype, device):
    twins.assert_op_alike(tolerances, "triton", "depth_attention", attend, given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hops", [1, 4])
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_op(by, tolerances, twins, device, T, D, hops, dtype):
    check(tolerances, twins, inputs(twins, COUNT, T, D, hops), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_scores(by, tolerances, twins, device, dtype):
    check(tolerances, twins, inputs(twins, COUNT, *SHAPES[0], 4, scored=True), dtype, device)


@pytest.mark.parametrize(("T", "D"), ODD)
def test_odd_sizes(by, tolerances, twins, device, T, D):
    check(tolerances, twins, inputs(twins, COUNT, T, D, 2), torch.bfloat16, device)


@pytest.mark.parametrize("hops", [1, 2])
def test_many_strided_sources(by, tolerances, twins, device, hops):
    given = inputs(twins, MANY, 37 if device == "cuda" else 1, 100, hops, apart=3)
    check(tolerances, twins, given, torch.bfloat16, device)


@pytest.mark.parametrize("hops", [1, 4])
def test_20_runs_are_alike_to_the_bit(by, twins, device, hops):
    given = inputs(twins, COUNT, *SHAPES[0], hops)
    repeats = 20 if device == "cuda" else 1
    twins.assert_repeatable(by, attend, given, torch.bfloat16, device, repeats)
