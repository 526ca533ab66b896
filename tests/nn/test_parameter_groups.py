import pytest
import torch

import deepfast
from deepfast.nn import TransformerEncoder


@pytest.mark.parametrize(
    ("connection", "tables"),
    [
        ("residual", set()),
        ("dlcl", {"dlcl.weight", "dlcl.norm_weight", "dlcl.norm_bias"}),
        ("attnres", {"residuals.query"}),
    ],
)
def test_every_parameter_once(connection, tables):
    model = TransformerEncoder(3, 16, 2, 32, connection=connection)
    model.layers[0].requires_grad_(False)
    named = {p: name.removeprefix("connection.") for name, p in model.named_parameters()}
    others, depth = deepfast.parameter_groups(model)
    assert {named[p] for p in depth["params"]} == tables
    assert depth["weight_decay"] == 0
    learning = [p for p in model.parameters() if p.requires_grad]
    assert [*others["params"]] == [p for p in learning if named[p] not in tables]
    before = [p.detach().clone() for p in depth["params"]]
    model(torch.randn(2, 3, 16)).sum().mul(0).backward()
    torch.optim.AdamW([others, depth], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close([p.detach() for p in depth["params"]], before, rtol=0, atol=0)


def test_only_modules():
    with pytest.raises(TypeError, match="model must be a module, got list"):
        deepfast.parameter_groups([])
