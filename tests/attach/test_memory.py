"""Memory policies of connected layers: the gradients of "none", and the bytes that are kept."""

import contextlib
import copy
import functools
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.attach import passes
from deepfast.memory import LiveBytes
from tests.attach.models import (
    AGAIN,
    CASES,
    GATED,
    READS,
    Block,
    X,
    assert_equal,
    connected_loop,
    every,
    gradients,
    outcome,
    perturbed,
)


@pytest.fixture
def same_blocks(monkeypatch):
    """Every policy sums in the same order."""
    monkeypatch.setattr(passes, "block", lambda recompute, rows: 2)


def test_blocks_change_only_the_rounding():
    torch.manual_seed(0)
    keep = perturbed(nn.Sequential(*(Block() for _ in range(40))))
    again = copy.deepcopy(keep)
    deepfast.connect(keep, norm="pre")
    deepfast.connect(again, norm="pre", recompute="layer+input")
    wanted, got = gradients(keep, keep(X)), gradients(again, again(X))
    for name in wanted:
        scale = wanted[name].abs().max()
        assert (got[name] - wanted[name]).abs().max() <= 1e-5 * scale, name


class Dropped(Block):
    def forward(self, x, scale=1.0):
        return super().forward(nn.functional.dropout(x, 0.3, self.training)) * scale


RUNS = {
    "plain": every,
    "checkpointed": lambda blocks, x: every(
        [lambda x, b=b: checkpoint(b, x, use_reentrant=False) for b in blocks], x
    ),
    "changed": lambda blocks, x: every([lambda x, b=b: b(x * 2) for b in blocks], x),
    "in place": lambda blocks, x: every([lambda x, b=b: b(x).add_(1) for b in blocks], x),
    "named": lambda blocks, x: every([lambda x, b=b: b(scale=0.5, x=x) for b in blocks], x),
}
"""How a loop calls its layers."""


def stack(recompute, how="plain"):
    return connected_loop(RUNS[how], Dropped, recompute=recompute)


def run(model, x=X):
    torch.manual_seed(1)
    return model(x)


def whole_step(model, x=X):
    return outcome(model, run(model, x))


def frozen(*names):
    """A step in which these parts and the lower half of the layers do not learn."""

    def step(model):
        for name in names:
            getattr(model, name).requires_grad_(False)
        model.blocks[:2].requires_grad_(False)
        return whole_step(model, X.clone().requires_grad_())

    return step


STEPS = {
    **{how: (how, whole_step) for how in RUNS},
    "two open passes": ("plain", lambda model: outcome(model, run(model), run(model, X + 1))),
    "frozen bottom": ("plain", frozen()),
    "frozen bottom and connection": ("plain", frozen("depth_connection")),
    "frozen layers": ("plain", frozen("blocks")),
    "all frozen": ("plain", frozen("blocks", "depth_connection")),
}


@pytest.mark.filterwarnings("error:deepfast")
@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_loop(name, recompute, same_blocks):
    """Backward drops the same elements. A loop may change what it passes on. Where it checkpoints
    what it calls, backward repeats the pushes."""
    how, step = STEPS[name]
    if how in ("changed", "in place"):
        warnings.filterwarnings("ignore", "deepfast.connect: layer . of Loop.blocks gets something")
    wanted = step(stack("none", "plain" if how == "checkpointed" else how))
    for policy in ("none", recompute):
        model = stack(policy, how)
        for _ in range(2):
            assert_equal(step(model), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_checkpointing_beside_it(recompute, reentrant, same_blocks):
    """Inside of the layers and around the parent: of no use with a policy, but right."""
    keep, again = stack("none"), stack(recompute)
    x = X.clone().requires_grad_()
    wanted = outcome(keep, run(keep, x))
    whole = functools.partial(run, again)
    assert_equal(outcome(again, checkpoint(whole, x, use_reentrant=reentrant)), wanted)
    for block in again.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    assert_equal(outcome(again, run(again, x)), wanted)


@pytest.mark.parametrize("end", ["backward", "forward", "error"])
@pytest.mark.parametrize(("name", "options"), [
    ("torch post-norm", {"recompute": "layer"}),
    ("sequential", {"recompute": "layer+input", "connection": "attnres"}),
    ("bert", {"recompute": "layer+input"}),
    *(("torch pre-norm", kind | {"recompute": policy})
      for kind in (READS, GATED) for policy in ("none", "layer")),
    ("llama", READS | {"recompute": "layer"}),
])  # fmt: skip
def test_a_pass_is_freed(name, options, end):
    case = CASES[name]
    model = case.connected(**options)
    outcome(model, case.run(model))
    if end == "error":
        case.layers(model)[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with LiveBytes() as live:
        with contextlib.suppress(ZeroDivisionError):
            out = case.run(model)
            if end == "backward":
                out.sum().backward()
            del out
        gc.collect()
        assert live.current == 0


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("name", ["torch pre-norm", "bert"])
def test_autocast(name, recompute, same_blocks):
    def step(model):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = CASES[name].run(model)
        return outcome(model, out)

    models = (CASES[name].connected(recompute=policy) for policy in (recompute, "none"))
    assert_equal(*map(step, models))


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("kind", ["dlcl", "attnres"])
def test_states_in_the_dtype_of_autocast(meter, kind, recompute, same_blocks):
    """On request, at half the bytes of the states."""
    left, grads, x = {}, {}, X.repeat(64, 1, 1)
    for dtype, policy in ((torch.float32, recompute), (None, recompute), (None, "none")):
        model = connected_loop(connection=kind, recompute=policy, state_dtype=dtype)
        with meter() as kept, torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype == (dtype or torch.bfloat16)
        left[dtype, policy], grads[dtype, policy] = kept.left, gradients(model, out)
    assert left[torch.float32, recompute] - left[None, recompute] >= 2 * 5 * x.numel()
    assert_equal(grads[None, recompute], grads[None, "none"])


def states_a_layer(recompute=None, checkpointed=False):
    """The peak of a step of torch's encoder, in states of a layer. The gradients exist before."""
    layers, x = 36, torch.randn(8, 32, 64)
    torch.manual_seed(0)
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
