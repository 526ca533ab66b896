"""Memory policies of connected layers: the gradients of "none", the bytes that are kept, and what a
layer reads when backward runs it again."""

import contextlib
import functools
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.attach import passes
from deepfast.attach.passes import CONNECT_POLICIES
from deepfast.memory import LiveBytes
from deepfast.policies import RERUN
from tests.attach import models
from tests.attach.models import CASES, READS, Block, D, X, assert_equal, connected_loop, every


@pytest.fixture
def same_blocks(monkeypatch):
    """Every policy sums in the same order."""
    monkeypatch.setattr(passes, "block", lambda recompute, rows: 2)


class Dropped(Block):
    def forward(self, x, scale=1.0):
        return super().forward(nn.functional.dropout(x, 0.3, self.training)) * scale


CALLS = {
    "plain": lambda block, x: block(x),
    "checkpointed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "changed": lambda block, x: block(x * 2),
    "in place": lambda block, x: block(x).add_(1),
    "named": lambda block, x: block(scale=0.5, x=x),
}
"""How a loop calls its layers."""


def run(model, x=X):
    torch.manual_seed(1)
    return model(x)


def whole_step(model, x=X):
    return models.outcome(model, run(model, x))


def around(model, reentrant):
    """The whole model is checkpointed."""
    x, whole = X.clone().requires_grad_(), functools.partial(run, model)
    return models.outcome(model, checkpoint(whole, x, use_reentrant=reentrant))


def frozen(model, *names):
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return whole_step(model, X.clone().requires_grad_())


STEPS = {
    "checkpointed whole": lambda model: around(model, False),
    "checkpointed whole, reentrant": lambda model: around(model, True),
    "two open passes": lambda model: models.outcome(model, run(model), run(model, X + 1)),
    "frozen bottom": lambda model: frozen(model, "blocks.0", "blocks.1"),
    "frozen layers": lambda model: frozen(model, "blocks"),
    "all frozen": lambda model: frozen(model, "blocks", "depth_connection"),
}


@pytest.mark.filterwarnings("error:deepfast")
@pytest.mark.parametrize("name", [*CALLS, *STEPS])
def test_steps_of_a_loop(name, same_blocks):
    """Backward drops the same elements. A loop may change what it passes on. Where it checkpoints
    what it calls, backward repeats the pushes."""
    call, step = CALLS.get(name, CALLS["plain"]), STEPS.get(name, whole_step)
    if name in ("changed", "in place"):
        warnings.filterwarnings("ignore", "deepfast.connect: layer . of Loop.blocks gets something")

    def loop(call, recompute="none"):
        return connected_loop(functools.partial(every, call=call), Dropped, recompute=recompute)

    plain = name.startswith("checkpointed")
    wanted = whole_step(loop(CALLS["plain"])) if plain else step(loop(call))
    for policy in CONNECT_POLICIES:
        model = loop(call, policy)
        for _ in range(2):
            assert_equal(step(model), wanted)


@pytest.mark.parametrize(("name", "options"), [
    ("sequential", {"recompute": "layer+input", "connection": "attnres"}),
    ("torch post-norm", {"recompute": "layer"}),
    ("torch pre-norm", READS),
    ("torch pre-norm", models.GATED | {"recompute": "layer"}),
])  # fmt: skip
def test_a_pass_is_freed(name, options):
    case = CASES[name]
    model = case.connected(**options)
    models.outcome(model, case.run(model))
    with LiveBytes() as live:
        for end in ("backward", "forward", "error"):
            if end == "error":
                case.layers(model)[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                out = case.run(model)
                if end == "backward":
                    out.sum().backward()
                del out
            gc.collect()
            assert live.current == 0, end


@pytest.mark.parametrize("kind", ["dlcl", "attnres"])
def test_autocast(meter, kind, same_blocks):
    """On request the states have its dtype, at half the bytes."""
    left, x = {}, X.repeat(64, 1, 1)
    for dtype in (torch.float32, None):
        wanted = None
        for policy in CONNECT_POLICIES:
            model = connected_loop(connection=kind, recompute=policy, state_dtype=dtype)
            with meter() as kept, torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            assert out.dtype == (dtype or torch.bfloat16)
            left[dtype, policy], found = kept.left, models.gradients(model, out)
            wanted = wanted or found
            assert_equal(found, wanted)
    for policy in RERUN:
        assert left[torch.float32, policy] - left[None, policy] >= 2 * 5 * x.numel()


def states_a_layer(recompute=None, checkpointed=False):
    """The peak of a step of torch's encoder, in states of a layer. The gradients exist before."""
    layers, x = 36, torch.randn(8, 32, 64)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for layer in model.layers if checkpointed else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if recompute is not None:
        deepfast.connect(model, norm="post", recompute=recompute)
    model(x).square().mean().backward()
    with LiveBytes() as live:
        model(x).square().mean().backward()
    return live.peak / (layers * x.nbytes)


@pytest.mark.slow
def test_bytes():
    """With "layer+input" a connection needs no more than checkpointing of the plain model."""
    plain, history = states_a_layer(checkpointed=True), states_a_layer("layer+input")
    assert history <= plain + 0.25
    assert plain + 1 <= states_a_layer("layer") < 0.5 * states_a_layer("none")
    # Checkpointing of the layers changes nothing.
    assert states_a_layer("layer+input", checkpointed=True) <= history + 0.1


class Reading(Block):
    """A layer that reads attributes of several kinds, another module's weight, and what its loop
    tells it: a dict and an object, in both of which it also replaces something."""

    def __init__(self):
        super().__init__()
        self.function, self.options = torch.tanh, {"shifts": [0.5, (2, 3.0)]}
        self.parent = [nn.Parameter(torch.eye(D))]

    def forward(self, x, table, told):
        table["calls"] = table["calls"] + 1.0
        x = x * table["scale"] * told.scale * table["calls"]
        table["loss"] = table.get("loss", 0.0) + x.mean()
        told.loss = told.loss + x.mean()
        x = x + self.function(self.linear(self.norm(x @ self.parent[0])))
        return x + self.options["shifts"][0]


def reading(recompute):
    """A connected loop of such layers, and what it tells them."""
    told = {"scale": 1.0, "calls": 0.0}, SimpleNamespace(scale=torch.ones(()), loss=0.0)
    run = functools.partial(every, call=lambda block, x: block(x, *told))
    return connected_loop(run, Reading, recompute=recompute), told


@pytest.mark.parametrize(("change", "said"), [
    (lambda b, _: setattr(b, "function", torch.relu), r"function of .* expected <built-in met"),
    (lambda b, _: b.options["shifts"].__setitem__(0, 2.0), r"0 of .* expected 0\.5, got 2\.0"),
    (lambda b, _: b.options["shifts"].pop(), r"1 of .* expected \(2, 3\.0\), got "),
    (lambda b, _: nn.init.zeros_(b.parent[0]), r"0 of a Reading .* got one that was changed"),
    (lambda b, _: setattr(b, "norm", nn.LayerNorm(D)), r"norm of .* got another one, LayerNorm"),
    (lambda _, told: told[0].__setitem__("scale", torch.ones(())), "scale of a Reading or its arg"),
    (lambda _, told: setattr(told[1], "scale", 2.0), "scale of a Reading or its arguments"),
    (lambda _, told: told[1].scale.fill_(2), "scale of a Reading or its arguments"),
])  # fmt: skip
def test_a_layer_that_is_another_one_in_backward_is_an_error(change, said):
    """The tests of the stacks' policies change parameters, buffers, modules and modes."""
    model, told = reading("layer")
    out = model(X)
    change(model.blocks[1], told)
    with pytest.raises(RuntimeError, match=f"recompute policy: {said}"):
        out.sum().backward()


def test_what_a_layer_replaces_in_an_argument_is_as_in_forward():
    found = []
    for recompute in CONNECT_POLICIES:
        model, (table, told) = reading(recompute)
        out = model(X).sin().sum()
        found.append(models.of_loss(model, out + table["loss"] + 2 * told.loss))
    torch.testing.assert_close(found[1:], [found[0]] * 2)
