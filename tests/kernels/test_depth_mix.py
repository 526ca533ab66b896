"""The depth_mix kernels against the launchers of the reference in float64."""

import pytest
import torch

from deepfast.reference import launchers as reference

OP = "depth_mix"
LOW = (torch.float32, torch.bfloat16, torch.float16)
WAYS = (torch.float32, torch.bfloat16)
SHAPES = [(0, 64), (1, 1), (5, 17), (17, 64), (5, 100), (1, 255), (17, 512)]


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""


def depth_mix(K, T, D, *, norm=True, norm_weight=True, norm_bias=True, per_channel=False,
strided=False,
              weight_grad=True, source_grad=True):  # fmt: skip
    given = {
        "sources": torch.randn(K + 1, T, D),
        "weight": torch.randn((K, D) if per_channel else (K,)),
        "norm_weight": 1 + 0.5 * torch.randn(K, D) if norm_weight else None,
        "norm_bias": torch.randn(K, D) if norm_bias else None,
    }

    def rows(dtype, x=None):
        x = torch.empty(T, D, dtype=dtype) if x is None else x.to(dtype)
        return torch.empty(T, 2 * D, dtype=dtype)[:, :D].copy_(x) if strided else x

    def run(launch, storage, dtype):
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        *sources, dout = (rows(dtype, x.to(storage)) for x in given["sources"])
        weight, norm_weight, norm_bias = (
            None if given[name] is None else given[name].to(compute)
            for name in ("weight", "norm_weight", "norm_bias")
        )
        mean, rstd = torch.empty(2, K, T, dtype=compute) if norm else (None, None)
        results = {"out": rows(dtype)}
        launch.depth_mix_forward(
            sources, weight, norm_weight, norm_bias, norm, 1e-5, results["out"], mean, rstd
        )
        if norm:
            results |= {"mean": mean.clone(), "rstd": rstd.clone()}
        dsources = [rows(dtype) for _ in sources] if source_grad else []
        grads = [
            None if x is None or not weight_grad else torch.empty_like(x)
            for x in (weight, norm_weight, norm_bias)
        ]
        launch.depth_mix_backward(
            sources, weight, norm_weight, norm_bias, norm, mean, rstd, dout, dsources, *grads
        )
        if source_grad:
            results["dsources"] = torch.stack(dsources)
        named = zip(("dweight", "dnorm_weight", "dnorm_bias"), grads, strict=True)
        return results | {name: grad for name, grad in named if grad is not None}

    return run


def assert_depth_mix(kernels, run, dtype, tolerances):
    got, plain = run(kernels, dtype, dtype), run(reference, dtype, dtype)
    tolerances.assert_all_accurate(got, plain, run(reference, dtype, torch.float64), dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees(shape, dtype, tolerances, kernels):
    assert_depth_mix(kernels, depth_mix(3, *shape), dtype, tolerances)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, torch.float16),
        (16, torch.bfloat16),
        (17, torch.bfloat16),
        (33, torch.float32),
        (121, torch.bfloat16),
    ],
)
def test_takes_any_number_of_sources(count, dtype, tolerances, kernels):
    assert_depth_mix(kernels, depth_mix(count, 3, 20), dtype, tolerances)


@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"norm": False, "norm_weight": False, "norm_bias": False},
        {"norm_weight": False},
        {"norm_bias": False},
        {"per_channel": True},
        {"per_channel": True, "norm": False, "norm_weight": False, "norm_bias": False},
        {"strided": True},
        {"weight_grad": False},
        {"source_grad": False},
    ],
    ids=lambda options: " ".join(options),
)
def test_with_optional_operands(options, dtype, tolerances, kernels):
    assert_depth_mix(kernels, depth_mix(3, 5, 40, **options), dtype, tolerances)


def test_reruns_are_bit_identical(kernels):
    run = depth_mix(5, 17, 100)
    first, second = (run(kernels, torch.bfloat16, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
