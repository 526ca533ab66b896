"""A parameter that a program has put in the place of a connection's own."""

import pytest
import torch
from torch import nn

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory

CASES = {
    "weight": (DLCL, {}, (4, 4)),
    "weight of a group": (DLCL, {"weight": "group", "groups": 2}, (4, 4, 2)),
    "weight of a vector": (DLCL, {"weight": "vector"}, (4, 4, 8)),
    "norm_weight": (DLCL, {}, (4, 8)),
    "norm_bias": (DLCL, {}, (4, 8)),
    "query": (AttentionResiduals, {}, (4, 8)),
    "norm_weight of a query": (AttentionResiduals, {"norm_weight": True}, (4, 8)),
    "bias": (AttentionResiduals, {"weights": "relu"}, (4, 4)),
}


def push_all(connection):
    history = DepthHistory()
    return [connection(torch.ones(3, 8), history) for _ in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_another_shape_or_dtype_is_refused(case):
    kind, options, shape = CASES[case]
    name = case.partition(" ")[0]
    for wrong in ((3, *shape[1:]), shape[:1], (*shape, 1)):
        connection = kind(3, 8, **options)
        setattr(connection, name, nn.Parameter(torch.ones(wrong)))
        with pytest.raises(ValueError, match=f"{name} must be .*{shape[-1]}\\), got \\({wrong[0]}"):
            push_all(connection)
    for dtype in (torch.int64, torch.complex64):
        setattr(connection, name, nn.Parameter(torch.ones(shape, dtype=dtype), False))
        with pytest.raises(ValueError, match=f"{name} must have a floating-point dtype"):
            push_all(connection)
    setattr(connection, name, nn.Parameter(torch.ones(shape, dtype=torch.float64)))
    assert len(push_all(connection)) == 4


@pytest.mark.parametrize(
    ("case", "name"),
    [("weight", "weight"), ("norm_weight", "norm_weight"), ("norm_weight of a query", "query")],
)
def test_a_missing_parameter_is_refused(case, name):
    kind, options, _ = CASES[case]
    connection = kind(3, 8, **options)
    setattr(connection, name, None)
    with pytest.raises(TypeError, match=f"{name} must be a tensor .*, got None"):
        push_all(connection)
