"""A read for each sublayer of somebody else's layer, against the literal loop over sublayers."""

import copy

import pytest
import torch
from torch import nn

import deepfast
from tests.attach import layers
from tests.attach.layers import BOTH, NAMES, SUMS, Checkpointed, TwoParts, connected, literal
from tests.attach.models import GATED, READS, Loop, X, perturbed, torch_encoder


def assert_literal(model):
    """Output and gradients of a connected model are those of the literal loop."""
    x = X.double().requires_grad_()
    plain = copy.deepcopy(model)
    connection = plain.depth_connection
    query, gamma = connection.query, getattr(connection, "gamma", None)
    deepfast.disconnect(plain)
    parameters = [*plain.parameters(), query, *([] if gamma is None else [gamma])]
    if hasattr(connection, "gamma") and gamma is None:
        gamma = torch.ones(connection.rows)
    found = []
    for out, own in (
        (model(x), [*model.parameters()]),
        (literal(plain, x, query, gamma), parameters),
    ):
        found.append([out.detach(), *torch.autograd.grad(out.square().mean(), [x, *own])])
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


CHECKPOINTED = layers.CheckpointedParts, layers.CheckpointedFirst, layers.CheckpointedSecond
ONE, GATES, AGAIN = {"additive": "one"}, {"additive": "gated"}, {"recompute": "layer"}


@pytest.mark.parametrize(("layer", "names", "options"), [
    (TwoParts, NAMES, {}),
    (TwoParts, NAMES, AGAIN),
    (TwoParts, NAMES, {"recompute": "layer+input"}),
    (layers.SideBySide, [(("norm1", "norm2"), None)], {}),
    (layers.AddsInPlace, BOTH, {}),
    (layers.ByKeyword, NAMES, {}),
    (layers.Nested, NAMES, {}),
    *((layer, NAMES, options) for layer in (Checkpointed, *CHECKPOINTED)
      for options in ({}, ONE, GATES)),
    *((layer, names, options)
      for layer, names in ((TwoParts, NAMES), (layers.Flat, NAMES), (layers.Differences, SUMS))
      for options in ({}, ONE, GATES, GATES | AGAIN)),
    (layers.Flat, SUMS, {}),
])  # fmt: skip
def test_same_as_the_literal_loop(layer, names, options):
    model = connected(layer, names, **options)
    assert_literal(model)
    assert model.blocks.attachment.current.thread.layer_run is None
    # A sublayer alone runs as ever.
    assert model.blocks[0].mlp(X.double()).shape == X.shape


def test_a_layer_that_checkpoints_itself_needs_no_policy():
    with pytest.raises(RuntimeError, match="connect it with recompute='none'"):
        assert_literal(connected(Checkpointed, recompute="layer"))


def test_blocks_of_layers_and_several_passes():
    """Two passes in flight, whose backward passes run in the same order."""
    model = connected(connection="block_attnres", block=2, recompute="layer")
    x, y = X.double().requires_grad_(), -X.double().requires_grad_()
    weight = model.blocks[0].norm1.weight
    wanted = [torch.autograd.grad(model(z).square().mean(), weight) for z in (x, y)]
    outs = [model(z) for z in (x, y)]
    got = [torch.autograd.grad(out.square().mean(), weight) for out in outs]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("options", [READS, GATED])
def test_torch_layers_in_training_and_evaluation(options):
    """torch's fast path of evaluation runs no modules of a layer."""
    model = perturbed(torch_encoder(norm_first=True))
    perturbed(deepfast.connect(model, norm="pre", **options))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X), model.train()(X))


def test_a_connected_model_in_a_layer_stays():
    model = connected(layers.Nested)
    inner = model.blocks[0].mlp
    before = inner(X.double())
    deepfast.disconnect(model)
    assert torch.equal(inner(X.double()), before)


def test_a_layer_that_stands_in_two_places():
    torch.manual_seed(0)
    model = perturbed(Loop(layer=TwoParts)).double()
    model.blocks[2] = model.blocks[0]
    perturbed(deepfast.connect(model, norm="pre", **READS | {"sublayers": NAMES}).double())
    assert_literal(model)
    model.blocks[0].norm1 = nn.Identity()
    copy.deepcopy(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_misfit(dtype):
    """The sums of a layer in 16 bits, with large inputs."""
    model = connected().to(dtype)
    for scale in (1, 1000):
        model.depth_connection.query.data.zero_()
        assert model(scale * X.to(dtype)).isfinite().all()
