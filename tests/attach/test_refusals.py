"""What cannot be connected or run, and the sentence that says so."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast import connect, connected, disconnect
from tests.attach import layers
from tests.attach.layers import BOTH, NAMES, TwoParts
from tests.attach.models import CASES, READS, Block, D, Loop, X, every


class Nested(nn.Module):
    """Loops over a list that lies deeper, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"h": Loop().blocks})

    def forward(self, x):
        return every(self.transformer.h, x)


class Outer(nn.Module):
    """Loops over the layers of a module whose forward it never calls."""

    def __init__(self, encoder=None):
        super().__init__()
        self.encoder = encoder or Loop()

    def forward(self, x):
        return every(self.encoder.blocks, x)


class Pretrained(nn.Module):
    from_pretrained = None


def loop(layers=2, **attributes):
    """A `Loop` with further attributes."""
    parent = Loop(layers=layers)
    for name, value in attributes.items():
        setattr(parent, name, value)
    return parent


def done(parent):
    connect(parent, norm="pre")
    return parent


SUBLAYERS = {"norm": "pre", "connection": "attnres", "sublayers": NAMES}
PAIRS = "sublayers must be 'auto' or a pair"
CONNECT = [
    (lambda: "encoder", {}, "parent must be a module, got str"),
    (lambda: nn.Linear(D, D), {},
     "name the list of layers .* Linear loops, got None; its lists are none"),
    (Nested, {}, r"got None; its lists are \['transformer.h'\]"),
    (lambda: Nested().transformer, {}, r"ModuleDict has no forward.* 'transformer\.h'"),
    (lambda: loop(others=nn.ModuleList([Block()])), {},
     r"got None; its lists are \['blocks', 'others'\]"),
    (Loop, {"layers": "nothing"}, r"got 'nothing'; its lists are \['blocks'\]"),
    (lambda: loop(0), {}, "Loop.blocks must be a list of layers"),
    (lambda: loop(layerdrop=0.1), {}, "Loop.layerdrop is 0.1"),
    (lambda: loop(blocks=type("Own", (nn.Sequential,), {})(Block())), {"layers": "blocks"},
     "not a subclass of one, got Own"),
    (lambda: nn.Sequential(nn.Linear(D, D)), {}, "cannot be inferred from Linear.*pass dim="),
    (lambda: loop(blocks=nn.ModuleList([Loop().blocks])), {},
     "Loop.blocks must be a list of layers that have a forward, got ModuleLists"),
    (lambda: nn.DataParallel(Loop()), {"layers": "module.blocks"},
     "one in DataParallel; connect the model before you wrap it"),
    (lambda: done(Loop()), {}, "Loop is connected already"),
    (lambda: Outer(done(Loop())), {"layers": "encoder.blocks"},
     r"Outer\.encoder\.blocks is connected already"),
    (Loop, {"norm": "both"}, "norm must be"),
    (Loop, {"recompute": "ffn"}, "recompute must be"),
    (Loop, {"connection": ["dlcl"]}, "connection must be"),
    (Loop, {"inplace": None}, "inplace must be True or False"),
    (Loop, {"window": 0}, "window"),
    (Loop, {"connection": "attnres", "norm": "post"}, "needs norm='pre'"),
    (Loop, {"connection": "attnres", "reads": 2}, "reads is given by sublayers=, got {'reads': 2}"),
    (Loop, {"connection": "denseformer", "norm_type": "rms"},
     "'denseformer' has no layer-norms, got norm_type="),
    (lambda: Loop(layer=TwoParts), SUBLAYERS | {"sublayers": "auto"},
     "sublayers='auto' knows LlamaDecoderLayer, .*; TwoParts is none"),
    (Loop, SUBLAYERS | {"sublayers": ()}, rf"{PAIRS} .*, got \(\)"),
    (Loop, SUBLAYERS | {"sublayers": [((), "linear")]}, PAIRS),
    (Loop, SUBLAYERS | {"sublayers": [(("norm", 2), "linear")]}, PAIRS),
    (Loop, SUBLAYERS, "sublayers: Block has no module 'norm1'; its modules are norm, linear"),
    (Loop, SUBLAYERS | {"sublayers": [("norm", "linear"), ("norm", None)]},
     "a LayerNorm is a part of two sublayers"),
    (Loop, {"connection": "dlcl", "sublayers": (("norm", "linear"),)},
     "sublayers needs attention residuals"),
    (Loop, SUBLAYERS | {"sublayers": None, "additive": "gated"},
     "additive='gated' needs sublayers=, got None"),
    (lambda: Loop(layer=TwoParts), SUBLAYERS | {"additive": "two"},
     "additive must be one of gated, one, got 'two'"),
    (lambda: Loop(layer=TwoParts), SUBLAYERS | {"additive": "one", "recompute": "layer+input"},
     r"expected recompute='none' or 'layer', got 'layer\+input'"),
]  # fmt: skip
TRACE = r"cannot trace the connected Loop; use torch\.export"
OTHERS = [
    (lambda: disconnect(None), r"deepfast.disconnect: expected a module, got NoneType"),
    (lambda: disconnect(Loop()), "Loop is not connected"),
    (lambda: disconnect(Outer(done(Loop()))), "Outer is not connected; disconnect its encoder"),
    (lambda: connected(nn.Linear, "x", norm="pre"), "expected a class of pretrained models"),
    (lambda: connected(Pretrained, "encoder"), "norm must be .*, got 'not given'"),
    (lambda: connected(Pretrained, "encoder", norm="pots"), "norm must be one of"),
    (lambda: connected(Pretrained, "x", norm="pre", recompute="all"), "recompute must be one of"),
    (lambda: connected(Pretrained, window=2), "window needs parent"),
    (lambda: torch.jit.trace(done(Loop()), (X,)), TRACE),
]


@pytest.mark.parametrize(("make", "options", "words"), CONNECT)
def test_what_connect_refuses(make, options, words):
    model = make()
    with pytest.raises((TypeError, ValueError), match=words):
        connect(model, **{"norm": "pre"} | options)


@pytest.mark.parametrize(("call", "words"), OTHERS)
def test_calls(call, words):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        call()


def shared():
    found = [TwoParts(), TwoParts()]
    found[1].attn = found[0].attn
    return found


def without_norm2():
    found = [TwoParts(), TwoParts()]
    del found[1].norm2
    return found


@pytest.mark.parametrize(("make", "message"), [
    (without_norm2, "TwoParts has no module 'norm2'"),
    (shared, "a Sequential is a part of two sublayers"),
    (lambda: [*layers.connected().blocks], "a LayerNorm is connected already, in another parent"),
])  # fmt: skip
def test_layers_that_do_not_fit_leave_the_model_as_it_was(make, message):
    model = Loop()
    model.blocks = nn.ModuleList(make())
    before = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        connect(model, **SUBLAYERS)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before
    assert "depth_connection" not in dict(model.named_children())


class Other(nn.Module):
    """A layer whose result is ``result(x)``."""

    def __init__(self, result):
        super().__init__()
        self.result, self.norm = result, nn.LayerNorm(D)

    def forward(self, x):
        return self.result(x)


def second(result):
    """A parent whose second layer is an `Other`."""
    return loop(blocks=nn.ModuleList([Block(), Other(result), Block()]))


def all_but(skipped):
    return Loop(lambda blocks, x: every((b for k, b in enumerate(blocks) if k not in skipped), x))


def longer():
    """A connected parent that gets another layer."""
    parent = done(Loop())
    parent.blocks.append(Block())
    return parent


def reentrant(blocks, x):
    x = x.clone().requires_grad_()
    return every([lambda x, b=b: checkpoint(b, x, use_reentrant=True) for b in blocks], x)


PASSES = [
    (all_but([1]), "layer 2 of Loop.blocks was called after 1 layers; .*LayerDrop"),
    (all_but([2]), "2 of 3 layers of Loop.blocks ran; .*LayerDrop"),
    (all_but([0, 1, 2]), "0 of 3 layers of Loop.blocks ran; .*LayerDrop"),
    (Loop(lambda blocks, x: every([b for b in blocks for _ in range(2)], x)),
     "layer 0 of Loop.blocks was called after 1 layers; .* once and in its order"),
    (Loop(lambda blocks, x: every([blocks[k] for k in range(3)], x)),
     "forward of Loop, 0 of 3 layers .* must loop over the list, not over indices"),
    (Loop(lambda blocks, x: every([b.forward for b in blocks], x)),
     "0 of 3 layers of Loop.blocks ran; .* as layer.* was replaced"),
    (Loop(lambda blocks, x: every(reversed(blocks), x)), "layer 2 .* in its order"),
    (Loop(lambda blocks, x: next(iter(blocks))()),
     "layer 0 of Loop.blocks was called without x, its first argument"),
    (Loop(reentrant), "use use_reentrant=False"),
    (second(lambda x: None), "output of layer 1 .* got NoneType"),
    (second(lambda x: ()), "got tuple"),
    (second(lambda x: x[:1]), rf"must be \(2, 5, {D}\), got \(1, 5, {D}\)"),
    (second(lambda x: x[..., :8]), rf"output of layer 1 .* \(2, 5, {D}\), got \(2, 5, 8\)"),
    (longer(), "Loop.blocks has another number of layers, since"),
]  # fmt: skip


@pytest.mark.parametrize(("parent", "words"), PASSES)
def test_passes(parent, words):
    if not hasattr(parent, "depth_connection"):
        connect(parent, norm="pre")
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        parent(X)
    # The pass is closed: outside of forward the list has the layers.
    assert all(isinstance(block, Block | Other) for block in parent.blocks)
    assert parent.blocks.attachment.current.pass_ is None


def test_passes_with_other_options():
    parent = Loop()
    connect(parent, norm="pre", dim=8)
    with pytest.raises(ValueError, match=r"layer 0 of Loop.blocks must be \(..., 8\).* pass dim="):
        parent(X)
    parent = second(lambda x: x.add_(1))
    connect(parent, norm="pre", connection="attnres")
    words = r"layer 1 of Loop\.blocks modifies its input"
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        parent(X)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 2)
    connect(encoder.eval(), norm="post")
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
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


def does(forward, attn=None):
    """A class of layers with another forward, and another first part."""

    def init(self):
        TwoParts.__init__(self)
        self.attn = self.attn if attn is None else attn()

    return type("Does", (TwoParts,), {"__init__": init, "forward": forward})


def into_the_output(m, x):
    """Adds into what its module returned."""
    h = m.attn(m.norm1(x))
    h += x
    return h + m.mlp(m.norm2(h))


def drops_behind(m, x):
    """A dropout behind the module that is named."""
    x = x + nn.functional.dropout(m.attn(m.norm1(x)), 0.5, m.training)
    return x + m.mlp(m.norm2(x))


FAULTS = {
    "swapped": (
        does(lambda m, x: (h := x + m.mlp(m.norm2(x))) + m.attn(m.norm1(h))), NAMES,
        "the sublayer behind norm2 of layer 0 runs out of turn"),
    "skips": (
        does(lambda m, x: x + m.mlp(m.attn(m.norm1(x)))), NAMES,
        "the sublayer behind norm2 of layer 0 did not run"),
    "runs twice": (
        does(lambda m, x: TwoParts.forward(m, x + m.attn(m.norm1(x)))), NAMES,
        "the sublayer behind norm1 of layer 0 runs twice in one call of the layer"),
    "another use of the norm": (
        does(lambda m, x: (h := x + m.attn(m.norm1(x)) + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
        "behind norm1 of layer 0 adds something else than attn returns"),
    "scales its input": (
        does(lambda m, x: TwoParts.forward(m, 2 * x)), NAMES,
        "layer 0 of Loop.blocks changes its input before its first norm"),
    "transposes": (
        does(lambda m, x: TwoParts.forward(m, x.transpose(0, 1)).transpose(0, 1)), NAMES,
        "changes its input before its first norm"),
    "its last module runs twice": (
        does(lambda m, x: (h := x + m.attn(m.norm1(x)) + 0 * m.attn(x)) + m.mlp(m.norm2(h))),
        NAMES, "behind norm1 of layer 0 has a last module that runs twice",
    ),
    "adds into the output": (
        does(into_the_output, attn=lambda: nn.Linear(D, D)), NAMES,
        "needs None in place of attn, whose output is modified in place"),
    "its last module does not run": (
        does(lambda m, x: (h := x + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
        "the sublayer behind norm1 of layer 0 ends before attn has run"),
    "a factor behind the module": (
        layers.Differences, (("norm1", None), ("norm2", "mlp")),
        "behind norm2 .* else than mlp returns"),
    "adds in place": (layers.AddsInPlace, NAMES, "behind norm2 .* is added in place"),
    "norms of two sublayers": (
        TwoParts, ((("norm1", "norm2"), None),), "its norms, which share a read, do not get one t"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_layers_that_do_something_else(fault):
    layer, sublayers, message = FAULTS[fault]
    model = layers.connected(layer, sublayers)
    with pytest.raises(RuntimeError, match=message):
        model(X[:, :2].double())
    # Nothing is left behind.
    disconnect(model)
    assert model.blocks[0](X.double()).shape == X.shape


def test_an_evaluation_first_hides_no_dropout():
    model = layers.connected(does(drops_behind), BOTH).eval()
    model(X.double())
    with pytest.raises(RuntimeError, match="adds something else than attn returns"):
        model.train()(X.double())


def test_a_norm_that_runs_behind_the_layer():
    """torch's post-norm layers have no norm before their sublayers."""
    model = CASES["torch post-norm"].make()
    with pytest.raises(ValueError, match="sublayers needs layers with their norms before"):
        connect(model, **READS, norm="pre")
    assert not hasattr(model, deepfast.attach.passes.NAME)
