"""A read for each sublayer of somebody else's layer, against the literal loop over sublayers."""

import copy
from functools import cache, partial

import pytest
import torch

import deepfast
from tests.attach import layers
from tests.attach.layers import BOTH, NAMES, SUMS, Checkpointed, TwoParts, connected, literal
from tests.attach.models import X, does


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


ONE, GATES, AGAIN = {"additive": "one"}, {"additive": "gated"}, {"recompute": "layer"}
BY_KEYWORD = does(
    lambda m, x: (h := x + m.attn(m.norm1(input=x))) + m.mlp(m.norm2(input=h)), layers.AddsInPlace
)
CHECKPOINTED = [
    Checkpointed,
    *(partial(layers.CheckpointedParts, *again) for again in ((1, 1), (1, 0), (0, 1))),
]


@pytest.mark.parametrize(("layer", "names", "options"), [
    (TwoParts, NAMES, {"recompute": "layer+input"}),
    (layers.SideBySide, [(("norm1", "norm2"), None)], {}),
    (layers.AddsInPlace, BOTH, {}),
    (BY_KEYWORD, BOTH, {}),
    # Disconnecting the model leaves those in its layers connected.
    (layers.Nested, NAMES, {}),
    *((layer, NAMES, options) for layer in CHECKPOINTED for options in ({}, ONE, GATES)),
    *((layer, names, options)
      for layer, names in ((TwoParts, NAMES), (TwoParts, SUMS), (layers.Flat, NAMES))
      for options in ({}, AGAIN, ONE, GATES, GATES | AGAIN)),
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


def test_one_layer_in_all_places():
    assert_literal(connected(cache(TwoParts)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_misfit(dtype):
    """The sums of a layer in 16 bits, with large inputs."""
    model = connected().to(dtype)
    for scale in (1, 1000):
        model.depth_connection.query.data.zero_()
        assert model(scale * X.to(dtype)).isfinite().all()
