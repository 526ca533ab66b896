"""The paper's ablations of DLCL, each from a recipe, and DenseFormer as a setting of DLCL."""

import pytest
import torch

from deepfast.mt.training import RecipeError, load_recipe
from deepfast.nn import TransformerEncoder
from tests.nn.written_out import DIM, HEADS, layer, leaf, norm_of
from tests.specifications.denseformer import denseformer

FFN, LAYERS = 20, 5


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 5), (7, 1)])
def test_denseformer_is_the_paper_s(dilation, period):
    model = TransformerEncoder(
        LAYERS, DIM, HEADS, FFN, connection="denseformer", dropout=0.0,
        dlcl={"dilation": dilation, "period": period},
    )  # fmt: skip
    connection = model.connection
    weight = connection.dlcl.weight
    averaged = [row for row in range(1, LAYERS + 1) if row % period == 0]
    torch.testing.assert_close(weight.detach(), torch.eye(LAYERS + 1))
    with torch.no_grad():
        # The paper has weights only after the blocks that average.
        weight[averaged] += 0.3 * torch.randn(len(averaged), LAYERS + 1)
    blocks = [
        lambda x, f=f, m=m: layer(f, x, norm_of(m, x))
        for f, m in zip(model.layers, connection.norms, strict=False)
    ]
    x = leaf(2, 4, DIM)
    want = denseformer(x, blocks, weight, dilation=dilation, period=period)
    want = norm_of(connection.norms[-1], want)
    got = model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(got)
    leaves = [x, *model.parameters()]
    a, b = (torch.autograd.grad((y * seed).sum(), leaves) for y in (got, want))
    names = ["x", *(name for name, _ in model.named_parameters())]
    for name, mine, theirs in zip(names, a, b, strict=True):
        if name == "connection.dlcl.weight":
            mine, theirs = mine[averaged], theirs[averaged]
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("connection", "given", "expected"),
    [
        ("dlcl", {}, ("average", "pre", True)),
        ("dlcl", {"norm": None}, ("average", None, True)),
        ("dlcl", {"init": "one", "learnable": False}, ("one", "pre", False)),
        ("denseformer", {}, ("identity", None, True)),
        ("denseformer", {"init": "average", "norm": "pre"}, ("average", "pre", True)),
    ],
)
def test_the_user_s_options_stand_above_the_preset_s(connection, given, expected):
    made = TransformerEncoder(LAYERS, DIM, HEADS, FFN, connection=connection, dlcl=given)
    dlcl = made.connection.dlcl
    assert (dlcl.init, dlcl.norm, dlcl.weight.requires_grad) == expected
    assert ("connection.dlcl.norm_weight" in made.state_dict()) == (dlcl.norm is not None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            "model.dlcl.norm=post",
            "dlcl: norm must be None or the stack's 'pre', got 'post'",
        ),
        ("model.encoder_connection=residual model.dlcl.norm=null", "dlcl needs a side with conn"),
        (
            "model.encoder_connection=denseformer model.dlcl.period=0",
            "period must be an integer",
        ),
    ],
)
def test_a_recipe_refuses(changes, sentence):
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("phrases-small", changes.split())


def test_a_plan_takes_denseformer_for_a_dlcl():
    recipe = load_recipe("phrases-small", ["model.encoder_connection=denseformer",
                                           "recompute=layer+input"])  # fmt: skip
    assert recipe.recompute == "layer+input"
    with pytest.raises(RecipeError, match=r"null where model\.cross_attention is transparent"):
        load_recipe("phrases-small", ["model.cross_attention=transparent", "memory_budget=2GiB"])
