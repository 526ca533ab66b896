"""What cannot be connected or run, and the sentence that says so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast import connect, connected, disconnect
from tests.attach import layers
from tests.attach.layers import BOTH, NAMES, DropsBehind, TwoParts
from tests.attach.models import CASES, READS, Block, D, Loop, Outer, X, does, every, torch_encoder


def loop(*blocks, **attributes):
    """A `Loop` with these layers, if any are given, and further attributes."""
    parent = Loop()
    parent.blocks = nn.ModuleList(blocks) if blocks else parent.blocks
    for name, value in attributes.items():
        setattr(parent, name, value)
    return parent


def done(parent):
    connect(parent, norm="pre")
    return parent


two_parts = partial(Loop, layer=TwoParts)


def shared():
    parent = two_parts()
    parent.blocks[1].attn = parent.blocks[0].attn
    return parent


SUBLAYERS = {"connection": "attnres", "sublayers": NAMES}
PAIRS = "sublayers must be 'auto' or a pair"
CONNECT = [
    (lambda: nn.Linear(D, D), {}, "name the list of layers .* got None; its lists are none"),
    (Outer, {}, r"got None; its lists are \['encoder.blocks'\]"),
    (lambda: loop(others=nn.ModuleList([Block()])), {}, r"lists are \['blocks', 'others'\]"),
    (lambda: Loop(layers=0), {}, "Loop.blocks must be a list of layers"),
    (lambda: loop(layerdrop=0.1), {}, "Loop.layerdrop is 0.1"),
    (lambda: nn.Sequential(nn.Linear(D, D)), {}, "cannot be inferred from Linear.*pass dim="),
    (lambda: loop(Loop().blocks), {}, "Loop.blocks .* layers that have a forward, got ModuleLists"),
    (lambda: nn.DataParallel(Loop()), {}, "DataParallel; connect the model before you wrap it"),
    (lambda: done(Loop()), {}, "Loop is connected already"),
    (lambda: Outer(done(Loop())), {"layers": "encoder.blocks"}, "Outer.encoder.blocks is conn"),
    (Loop, {"connection": "attnres", "norm": "post"}, "needs norm='pre'"),
    (Loop, {"connection": "attnres", "reads": 2}, "reads is given by sublayers=, got {'reads': 2}"),
    (Loop, {"connection": "denseformer", "norm_type": "rms"}, "no layer-norms, got norm_type="),
    (two_parts, READS, "sublayers='auto' knows LlamaDecoderLayer, .*; TwoParts is none"),
    (Loop, SUBLAYERS | {"sublayers": ()}, rf"{PAIRS} .*, got \(\)"),
    (lambda: loop(TwoParts(), Block()), SUBLAYERS, "Block has no module 'norm1'; .* norm, linear"),
    (shared, SUBLAYERS, "a Sequential is a part of two sublayers"),
    (lambda: loop(*layers.connected().blocks), SUBLAYERS, "is connected already, in another paren"),
    # torch's post-norm layers have no norm before their sublayers.
    (torch_encoder, READS, "sublayers needs layers with their norms before"),
    (Loop, {"sublayers": (("norm", "linear"),)}, "sublayers needs attention residuals"),
    (Loop, {"connection": "attnres", "additive": "one"}, "additive='one' needs sublayers=, got N"),
    (two_parts, SUBLAYERS | {"additive": "one", "recompute": "layer+input"},
     r"expected recompute='none' or 'layer', got 'layer\+input'"),
]  # fmt: skip
PRETRAINED = type("Pretrained", (), {"from_pretrained": None})
TRACE = r"cannot trace the connected Loop; use torch\.export"
OTHERS = [
    (lambda: connect("encoder", norm="pre"), "parent must be a module, got str"),
    (lambda: disconnect(Outer(done(Loop()))), "Outer is not connected; disconnect its encoder"),
    (lambda: connected(nn.Linear, "x", norm="pre"), "expected a class of pretrained models"),
    (lambda: connected(PRETRAINED, "encoder"), "norm must be .*, got 'not given'"),
    (lambda: connected(PRETRAINED, window=2), "window needs parent"),
    (lambda: torch.jit.trace(done(Loop()), (X,)), TRACE),
]


@pytest.mark.parametrize(("make", "options", "words"), CONNECT)
def test_what_connect_refuses_stays_as_it_was(make, options, words):
    def facts():
        return repr(model), [{**m._forward_pre_hooks} for m in model.modules()]

    model = make()
    before = facts()
    with pytest.raises((TypeError, ValueError), match=words):
        connect(model, **{"norm": "pre"} | options)
    assert facts() == before


@pytest.mark.parametrize(("call", "words"), OTHERS)
def test_calls(call, words):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        call()


def second(result):
    """A parent whose second layer returns ``result(x)``."""
    return loop(Block(), does(lambda _, x: result(x))(), Block())


def all_but(*skipped):
    return Loop(lambda blocks, x: every((b for k, b in enumerate(blocks) if k not in skipped), x))


REENTRANT = partial(every, call=lambda block, x: checkpoint(block, x, use_reentrant=True))
IN_PLACE = r"layer 1 of Loop\.blocks modifies its input in place"
PASSES = [
    (all_but(1), {}, "layer 2 of Loop.blocks was called after 1 layers; .*LayerDrop"),
    (all_but(2), {}, "2 of 3 layers of Loop.blocks ran; .*LayerDrop"),
    (Loop(lambda blocks, x: every([b for b in blocks for _ in range(2)], x)), {},
     "layer 0 of Loop.blocks was called after 1 layers; .* once and in its order"),
    (Loop(lambda blocks, x: every([blocks[k] for k in range(3)], x)), {},
     r"0 of 3 layers .* must loop over the list, not over indices, and call .* as layer\(x\)"),
    (Loop(lambda blocks, x: every(reversed(blocks), x)), {}, "layer 2 .* in its order"),
    (Loop(lambda blocks, x: next(iter(blocks))()), {},
     "layer 0 of Loop.blocks was called without x, its first argument"),
    (Loop(REENTRANT), {}, "use use_reentrant=False"),
    (second(lambda x: None), {}, "output of layer 1 .* got NoneType"),
    (second(lambda x: ()), {}, "got tuple"),
    (second(lambda x: x[:1]), {}, rf"must be \(2, 5, {D}\), got \(1, 5, {D}\)"),
    (second(lambda x: x[..., :8]), {}, rf"output of layer 1 .* \(2, 5, {D}\), got \(2, 5, 8\)"),
    (second(lambda x: x.add_(1)), {"connection": "attnres"}, IN_PLACE),
    (second(lambda x: x.add_(1)), {"recompute": "layer+input"}, IN_PLACE),
    (Loop(), {"dim": 8}, r"layer 0 of Loop.blocks must be \(..., 8\).* pass dim="),
]  # fmt: skip


@pytest.mark.parametrize(("parent", "options", "words"), PASSES)
def test_passes(parent, options, words):
    connect(parent, norm="pre", **options)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        parent(X.clone().requires_grad_())
    # The pass is closed: outside of forward the list has the layers.
    assert all(isinstance(block, Block) for block in parent.blocks)
    assert parent.blocks.attachment.current.pass_ is None


def test_nested_tensors():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 2)
    connect(encoder.eval(), norm="post")
    padding = torch.arange(5).expand(2, 5) > torch.tensor([[4], [2]])
    with torch.no_grad(), pytest.raises(TypeError, match=r"nested.*enable_nested_tensor=False"):
        encoder(X, src_key_padding_mask=padding)


def test_a_cache_with_a_policy():
    case = CASES["llama"]
    model = case.make()
    case.connect(model, recompute="layer+input")
    with pytest.raises(RuntimeError, match=r"takes a cache \(\w+\).*use_cache=False"):
        case.run(model)
    with torch.no_grad():
        case.run(model)


def into_the_output(m, x):
    """Adds into what its module returned."""
    h = m.attn(m.norm1(x))
    h += x
    return h + m.mlp(m.norm2(h))


acts = partial(does, base=TwoParts)
FAULTS = [
    (acts(lambda m, x: (h := x + m.mlp(m.norm2(x))) + m.attn(m.norm1(h))), NAMES,
     "the sublayer behind norm2 of layer 0 runs out of turn"),
    (acts(lambda m, x: x + m.mlp(m.attn(m.norm1(x)))), NAMES,
     "the sublayer behind norm2 of layer 0 did not run"),
    (acts(lambda m, x: TwoParts.forward(m, x + m.attn(m.norm1(x)))), NAMES,
     "the sublayer behind norm1 of layer 0 runs twice in one call of the layer"),
    # Another use of the norm.
    (acts(lambda m, x: (h := x + m.attn(m.norm1(x)) + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
     "behind norm1 of layer 0 adds something else than attn returns"),
    (acts(lambda m, x: TwoParts.forward(m, 2 * x)), NAMES,
     "layer 0 of Loop.blocks changes its input before its first norm"),
    (acts(lambda m, x: TwoParts.forward(m, x.transpose(0, 1)).transpose(0, 1)), NAMES,
     "changes its input before its first norm"),
    (acts(lambda m, x: (h := x + m.attn(m.norm1(x)) + 0 * m.attn(x)) + m.mlp(m.norm2(h))), NAMES,
     "behind norm1 of layer 0 has a last module that runs twice"),
    (acts(into_the_output), NAMES,
     "needs None in place of attn, whose output is modified in place"),
    (acts(lambda m, x: (h := x + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
     "the sublayer behind norm1 of layer 0 ends before attn has run"),
    # A factor behind the module.
    (TwoParts, (("norm1", None), ("norm2", "mlp")), "behind norm2 .* else than mlp returns"),
    (layers.AddsInPlace, NAMES, "behind norm2 .* is added in place"),
    (TwoParts, ((("norm1", "norm2"), None),), "its norms, which share a read, do not get one t"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "sublayers", "words"), FAULTS)
def test_layers_that_do_something_else(layer, sublayers, words):
    model = layers.connected(layer, sublayers)
    with pytest.raises(RuntimeError, match=words):
        model(X[:, :2].double())
    # Nothing is left behind.
    disconnect(model)
    assert model.blocks[0](X.double()).shape == X.shape


def test_an_evaluation_first_hides_no_dropout():
    model = layers.connected(DropsBehind, BOTH).eval()
    model(X.double())
    with pytest.raises(RuntimeError, match="adds something else than attn returns"):
        model.train()(X.double())
