"""Memory policies of connected layers: the gradients of "none", and the bytes that are kept."""

import copy
import functools
import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from bench.attach import bert, states_per_layer, torch_encoder
from deepfast.attach import passes
from deepfast.memory import LiveBytes
from tests.attach import models
from tests.attach.models import CASES, Block, X, assert_equal, connected_loop, gradients, perturbed

AGAIN = ["layer", "layer+input"]


@pytest.fixture
def same_blocks(monkeypatch):
    """Every policy sums in the same order."""
    monkeypatch.setattr(passes, "block", lambda recompute, rows: 2)


def made(name, recompute, kind="dlcl"):
    case = CASES[name]
    torch.manual_seed(0)
    model = perturbed(case.make())
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    for connection in case.connect(model, kind, recompute=recompute).values():
        perturbed(connection)
    return model


def all_of(model, *outputs):
    """All gradients, and the first output. Dropout after the model draws the same numbers."""
    return gradients(model, *outputs) | {"output": outputs[0].detach(), "random": torch.rand(3)}


def results(name, model):
    torch.manual_seed(1)
    return all_of(model, CASES[name].run(model))


# Attention residuals are for pre-norm models.
@pytest.mark.only_if(lambda name, kind: "attnres" not in kind or CASES[name].norm == "pre")
@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("kind", ["dlcl", "denseformer", "attnres", "block_attnres"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_keep(name, kind, recompute, same_blocks):
    """To the bit."""
    wanted = results(name, made(name, "none", kind))
    assert_equal(results(name, made(name, recompute, kind)), wanted)


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
    "plain": models.every,
    "checkpointed": lambda blocks, x: models.every(
        [lambda x, b=b: checkpoint(b, x, use_reentrant=False) for b in blocks], x
    ),
    "changed": lambda blocks, x: models.every([lambda x, b=b: b(x * 2) for b in blocks], x),
    "in place": lambda blocks, x: models.every([lambda x, b=b: b(x).add_(1) for b in blocks], x),
    "named": lambda blocks, x: models.every([lambda x, b=b: b(scale=0.5, x=x) for b in blocks], x),
}
"""How a loop calls its layers."""


def stack(recompute, how="plain"):
    return connected_loop(RUNS[how], Dropped, recompute=recompute)


def run(model, x=X):
    torch.manual_seed(1)
    return model(x)


@pytest.mark.filterwarnings("ignore:deepfast.connect. layer")
@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("how", RUNS)
def test_dropout_and_loops(how, recompute, same_blocks):
    """Backward drops the same elements. A loop may change what it passes on."""
    keep, again = stack("none", how), stack(recompute, how)
    assert_equal(all_of(again, run(again)), all_of(keep, run(keep)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_checkpointing_beside_it(recompute, reentrant, same_blocks):
    """Inside of the layers and around the parent: of no use with a policy, but right."""
    keep, again = stack("none"), stack(recompute)
    x = X.clone().requires_grad_()
    wanted = all_of(keep, run(keep, x))
    whole = functools.partial(run, again)
    assert_equal(all_of(again, checkpoint(whole, x, use_reentrant=reentrant)), wanted)
    for block in again.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    assert_equal(all_of(again, run(again, x)), wanted)


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "bart"])
def test_checkpointing_of_transformers_beside_it(name, recompute, same_blocks):
    keep, again = (made(name, m).train() for m in ("none", recompute))
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(results(name, again), results(name, keep))


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("name", ["torch post-norm", "bert", "llama", "t5"])
def test_a_pass_is_freed(name, recompute):
    """With its backward and without."""
    model = made(name, recompute)
    results(name, model)
    with LiveBytes() as live:
        for backward in (False, True):
            out = CASES[name].run(model)
            if backward:
                out.sum().backward()
            del out
            assert live.current == 0


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("name", ["torch pre-norm", "torch post-norm", "bert"])
def test_autocast(name, recompute, same_blocks):
    def step(model):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = CASES[name].run(model)
        return all_of(model, out)

    assert_equal(step(made(name, recompute)), step(made(name, "none")))


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


@pytest.mark.parametrize("kind", ["dlcl", "attnres"])
def test_what_16_bit_states_save_and_cost(meter, kind):
    """As docs/training.md says: bytes kept by 12 layers of torch, and the gradients' errors."""
    x, target = torch.randn(2, 4, 64, 128)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, nn.LayerNorm(128), enable_nested_tensor=False)
    left, found = [], []
    for state_dtype, dtype in ((None, torch.float64), (torch.float32,) * 2, (None, torch.float32)):
        run = copy.deepcopy(model)
        deepfast.connect(run, norm="pre", connection=kind, state_dtype=state_dtype)
        run.to(dtype)
        with meter() as kept, torch.autocast("cpu", torch.bfloat16, dtype == torch.float32):
            out = run(x.to(dtype))
        grads = gradients(run, out.to(dtype) - target)
        left.append(kept.left)
        found.append(torch.cat([g.double().flatten() for g in grads.values()]))
    exact, wide, narrow = found
    assert left[2] < 0.87 * left[1]
    assert 1.3 < (narrow - exact).norm() / (wide - exact).norm() < 3


def frozen(*names):
    """A step in which these parts do not learn."""

    def step(model):
        for name in names:
            getattr(model, name).requires_grad_(False)
        model.blocks[:2].requires_grad_(False)
        return all_of(model, run(model))

    return step


STEPS = {
    "two open passes": lambda model: all_of(model, run(model), run(model, X + 1)),
    "frozen bottom": frozen(),
    "frozen bottom and connection": frozen("depth_connection"),
    "frozen layers": frozen("blocks"),
}


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_a_loop(step, recompute, same_blocks):
    assert_equal(STEPS[step](stack(recompute)), STEPS[step](stack("none")))


def test_nothing_learns():
    model = stack("layer+input").requires_grad_(False)
    assert torch.equal(run(model), run(stack("none")))
    with torch.inference_mode():
        run(stack("layer+input"))


def test_a_cache_is_refused():
    case = CASES["llama"]
    model = case.make()
    case.connect(model, recompute="layer+input")
    with pytest.raises(RuntimeError, match=r"takes a cache \(\w+\).*use_cache=False"):
        case.run(model)
    with torch.no_grad():
        case.run(model)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_connected_class(name, tmp_path):
    """The config does not say how a pass runs."""
    case = CASES[name]
    plain = case.make()
    path, _, layers = case.parents[0].partition(":")
    cls = deepfast.connected(
        type(plain), path, layers, norm=case.norm, recompute="layer+input", inplace=False
    )
    model = cls(plain.config)
    for one in (model, copy.deepcopy(model)):
        settings = getattr(one.get_submodule(path), layers).attachment.settings
        assert (settings.recompute, settings.inplace) == ("layer+input", False)
    model.save_pretrained(tmp_path)
    again = deepfast.connected(type(plain)).from_pretrained(tmp_path)
    settings = getattr(again.get_submodule(path), layers).attachment.settings
    assert (settings.recompute, settings.inplace) == ("none", True)
    assert torch.equal(case.run(again.eval()), case.run(model.eval()))


MAKES = [torch_encoder]
if models.TRANSFORMERS and importlib.util.find_spec("transformers") is not None:
    MAKES.append(bert)


def states(make, form):
    """States a layer: docs/results.md has the same table."""
    return states_per_layer(make, form, layers=36, dim=64, batch=8, length=32)


@pytest.mark.parametrize("make", MAKES)
def test_bytes(make):
    plain, history = states(make, "no connection, checkpointed"), states(make, "layer+input")
    assert history <= plain + 0.25
    assert states(make, "layer") >= plain + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES)
def test_bytes_beside_checkpointing(make):
    history = states(make, "layer+input")
    assert states(make, "none, checkpointed") >= history + 0.9
    assert states(make, "literal loop, checkpointed") >= history + 2.5
    # Checkpointing of the layers changes nothing.
    assert states(make, "layer+input, checkpointed") <= history + 0.1
