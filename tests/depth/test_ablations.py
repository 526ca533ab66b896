"""The paper's ablations of DLCL, each from a recipe, and DenseFormer as a setting of DLCL."""

import pytest
import torch

from deepfast.mt.models import build
from deepfast.mt.training import RecipeError, load_recipe
from deepfast.nn import TransformerEncoder
from deepfast.reference.denseformer import denseformer
from tests.nn.written_out import (
    DIM,
    HEADS,
    assert_same,
    layer,
    leaf,
    naive,
    norm_of,
)

FFN, LAYERS = 20, 5
NORMS = pytest.mark.parametrize("norm", ["pre", "post"])
ABLATIONS = {
    "no layer-norm": ["model.dlcl.norm=null"],
    "frozen one": ["model.dlcl.init=one", "model.dlcl.learnable=false"],
    "frozen average": ["model.dlcl.init=average", "model.dlcl.learnable=false"],
    "plain stack": ["model.dlcl.norm=null", "model.dlcl.init=identity",
                    "model.dlcl.learnable=false"],
    "denseformer": ["model.encoder_connection=denseformer", "model.dlcl.dilation=2"],
}  # fmt: skip
FIXED = {
    "frozen one": torch.ones(LAYERS + 1, LAYERS + 1).tril(),
    "frozen average": torch.ones(LAYERS + 1, LAYERS + 1).tril()
    / torch.arange(1, LAYERS + 2).unsqueeze(1),
    "plain stack": torch.eye(LAYERS + 1),
}


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


def encoder(name, norm, **changes):
    """The encoder of a recipe, with norms and matrices away from their init."""
    sizes = [f"model.dim={DIM}", f"model.heads={HEADS}", f"model.ffn_dim={FFN}",
             f"model.encoder_layers={LAYERS}", f"model.norm={norm}", "model.dropout=0"]  # fmt: skip
    recipe = load_recipe("phrases-small", [*sizes, *ABLATIONS[name]])
    made = build(recipe.model_config(vocab_size=9)).encoder
    with torch.no_grad():
        for key, p in made.named_parameters():
            if key != "connection.dlcl.weight":
                p.add_(0.1 * torch.randn_like(p))
    return made


@NORMS
@pytest.mark.parametrize("name", ABLATIONS)
def test_a_recipe_s_encoder_is_the_naive_loop(name, norm):
    model, x = encoder(name, norm), leaf(2, 4, DIM)
    assert_same(model(x), naive(model, x), model, [x])
    dlcl = model.connection.dlcl
    if name in FIXED:
        assert not dlcl.weight.requires_grad
        torch.testing.assert_close(dlcl.effective_weight(), FIXED[name])
    else:
        assert dlcl.weight.requires_grad
    bare = name in ("no layer-norm", "plain stack", "denseformer")
    assert dlcl.norm == (None if bare else norm)
    assert ("connection.dlcl.norm_weight" in model.state_dict()) is not bare


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


def test_the_user_s_options_stand_above_the_preset_s():
    options = {"init": "average", "weight": "vector", "norm": "pre"}
    dlcl = TransformerEncoder(
        LAYERS, DIM, HEADS, FFN, connection="denseformer", dlcl=options
    ).connection.dlcl
    assert (dlcl.init, dlcl.kind, dlcl.norm) == ("average", "vector", "pre")


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
            "period must be a whole number",
        ),
    ],
)
def test_a_recipe_refuses(changes, sentence):
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("phrases-small", changes.split())


def test_a_plan_takes_denseformer_for_a_dlcl():
    recipe = load_recipe("phrases-small", ["model.encoder_connection=denseformer",
                                           "memory=history"])  # fmt: skip
    assert recipe.memory == "history"
    with pytest.raises(RecipeError, match=r"null where model\.cross_attention is transparent"):
        load_recipe("phrases-small", ["model.cross_attention=transparent", "memory=2GiB"])
