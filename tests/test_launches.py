"""The table of launches, and what is generated from it."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from tests.kernels.agreement import numbers


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_compiled_schemas(name):
    schema = getattr(torch.ops.deepfast, name).default._schema
    assert str(schema).removeprefix("deepfast::") == LAUNCHES[name].schema


FORWARD, MIX = "layer_norm_forward", "mix_rows"
NO_SEED = "dropout_p is 0.5 and the seed is missing"


@pytest.mark.parametrize(("name", "changed", "words"), [
    (FORWARD, {"y": torch.zeros(5, 7)}, r"y: expected \(5, 8\) in float32 .* got \(5, 7\)"),
    (FORWARD, {"residual": torch.zeros(5, 8).double()}, "residual: expected .* in float32"),
    (FORWARD, {"weight": torch.ones(8).double()}, "weight: expected .* got .* in float64"),
    (FORWARD, {"weight": torch.ones(16)[::2]}, "weight: expected .* not contiguous"),
    (FORWARD, {"y": torch.zeros(5, 16)[:, ::2]}, "y: expected .* with channels apart"),
    (FORWARD, {"x": torch.zeros(5)}, "x: expected more than 1 dimensions"),
    (FORWARD, {"x": torch.zeros(5, 8).int()}, "x: expected float32, float64, bfloat16"),
    (FORWARD, {"dropout_p": 0.5}, NO_SEED),
    (FORWARD, {"seed": torch.tensor([3])}, r"seed: expected \(\) in .* got \(1\) in int64"),
    (FORWARD, {"seed": torch.tensor(3.0)}, r"seed: .*, got \(\) in float32"),
    ("layer_norm_backward", {"dropout_p": 0.5}, NO_SEED),
    ("activation_forward", {"kind": "relu", "dropout_p": 0.5}, NO_SEED),
    ("activation_backward", {"kind": "gelu", "dropout_p": 0.5}, NO_SEED),
    ("activation_forward", {"kind": "tanh"}, "expected relu or gelu, got tanh"),
    (MIX, {"sources": [24]}, "sources: expected indices below 24, got 24"),
    (MIX, {"rows": [-1]}, "rows: expected indices below 24, got -1"),
    (MIX, {"out_rows": [4]}, "out_rows: expected indices below 4, got 4"),
    (MIX, {"rows": [1, 2]}, "expected as many out_rows as rows, 2, got 3"),
    (MIX, {"out": torch.zeros(4, 4, 8)}, r"out: expected \(4, 5, 8\)"),
])  # fmt: skip
def test_an_operand_that_does_not_fit_is_named(name, changed, words):
    launches = backend.choose(LAUNCHES[name].op, "cpu", "cpu", torch.float32)[1]
    with pytest.raises(RuntimeError, match=words):
        getattr(launches, name)(**numbers(name, T=5, D=8, dropout_p=0.0) | changed)
