"""What cannot be connected or run, and the sentence that says so."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast import connect, connected, disconnect
from tests.attach.models import Block, D, Loop, X, every, torch_encoder


class Nested(nn.Module):
    """Loops over a list that lies deeper, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"h": Loop().blocks})

    def forward(self, x):
        return every(self.transformer.h, x)


class Outer(nn.Module):
    """Loops over the layers of a module whose forward it never calls."""

    def __init__(self):
        super().__init__()
        self.encoder = Loop()

    def forward(self, x):
        return every(self.encoder.blocks, x)


class Subclass(nn.Sequential):
    """A list of a class of its own."""


class Pretrained(nn.Module):
    from_pretrained = None


def loop(layers=3, **attributes):
    """A `Loop` with further attributes."""
    parent = Loop(layers=layers)
    for name, value in attributes.items():
        setattr(parent, name, value)
    return parent


def done(parent):
    connect(parent, norm="pre")
    return parent


def inside(parent):
    outer = Outer()
    outer.encoder = parent
    return outer


CALLS = [
    (lambda: connect("encoder", norm="pre"), TypeError, "parent must be a module, got str"),
    (lambda: connect(nn.Linear(D, D), norm="pre"), ValueError,
     "name the list of layers .* Linear loops, got None; its lists are none"),
    (lambda: connect(Nested(), norm="pre"), ValueError,
     r"got None; its lists are \['transformer.h'\]"),
    (lambda: connect(Nested(), "transformer.g", norm="pre"), ValueError,
     r"got 'transformer.g'; its lists are \['transformer.h'\]"),
    (lambda: connect(Nested().transformer, norm="pre"), ValueError,
     r"ModuleDict has no forward.* 'transformer\.h'"),
    (lambda: connect(loop(others=nn.ModuleList([Block()])), norm="pre"), ValueError,
     r"got None; its lists are \['blocks', 'others'\]"),
    (lambda: connect(Loop(), "nothing", norm="pre"), ValueError,
     r"got 'nothing'; its lists are \['blocks'\]"),
    (lambda: connect(Loop(), 3, norm="pre"), ValueError, "layers= to name the list .*, got 3"),
    (lambda: connect(loop(0), norm="pre"), ValueError, "Loop.blocks must be a list of layers"),
    (lambda: connect(loop(layerdrop=0.1), norm="pre"), ValueError, "Loop.layerdrop is 0.1"),
    (lambda: connect(nn.Sequential(nn.Linear(D, D)), norm="pre"), ValueError,
     "cannot be inferred from Linear.*pass dim="),
    (lambda: connect(loop(blocks=nn.ModuleList([Loop().blocks])), norm="pre"), ValueError,
     "Loop.blocks must be a list of layers that have a forward, got ModuleLists"),
    (lambda: connect(loop(blocks=Subclass(Block())), "blocks", norm="pre"), TypeError,
     "not a subclass of one, got Subclass"),
    (lambda: connect(Loop(), norm="both"), ValueError, "norm must be"),
    (lambda: connect(Loop(), norm="pre", recompute="ffn"), ValueError, "recompute must be"),
    (lambda: connect(torch.compile(Loop()), norm="pre"), ValueError,
     "one in OptimizedModule; connect the model before you wrap it"),
    (lambda: connect(nn.DataParallel(Loop()), "module.blocks", norm="pre"), ValueError,
     "one in DataParallel; connect the model before you wrap it"),
    (lambda: connect(Loop(), norm="pre", connection="nothing"), ValueError, "connection must be"),
    (lambda: connect(Loop(), norm="pre", connection=["dlcl"]), ValueError, "connection must be"),
    (lambda: connect(Loop(), norm="pre", inplace=None), ValueError,
     "inplace must be True or False"),
    (lambda: connect(Loop(), norm="post", connection="attnres"), ValueError, "needs norm='pre'"),
    (lambda: connect(Loop(), norm="pre", connection="attnres", reads=2), ValueError,
     "reads is given by sublayers=, got {'reads': 2}"),
    (lambda: connect(Loop(), norm="pre", window=0), ValueError, "window"),
    (lambda: connect(Loop(), norm="pre", connection="denseformer", norm_type="rms"), ValueError,
     "'denseformer' has no layer-norms, got norm_type="),
    (lambda: connect(done(Loop()), norm="pre"), ValueError, "Loop is connected already"),
    (lambda: connect(inside(done(Loop())), "encoder.blocks", norm="pre"), ValueError,
     r"Outer\.encoder\.blocks is connected already"),
    (lambda: disconnect(None), TypeError, r"deepfast.disconnect: expected a module, got NoneType"),
    (lambda: disconnect(Loop()), ValueError, "Loop is not connected"),
    (lambda: disconnect(inside(done(Loop()))), ValueError,
     "Outer is not connected; disconnect its encoder"),
    (lambda: connected(nn.Linear, "x", norm="pre"), TypeError,
     "expected a class of pretrained models"),
    (lambda: connected(Pretrained, "encoder"), ValueError, "norm must be .*, got 'not given'"),
    (lambda: connected(Pretrained, "encoder", norm="pots"), ValueError, "norm must be one of"),
    (lambda: connected(Pretrained, "encoder", norm="pre", recompute="all"), ValueError,
     "recompute must be one of"),
    (lambda: connected(Pretrained, norm="post"), TypeError, "norm needs parent"),
    (lambda: connected(Pretrained, connection="denseformer"), TypeError, "connection needs parent"),
    (lambda: connected(Pretrained, window=2), TypeError, "window needs parent"),
    (lambda: torch.jit.trace(done(Loop()), (X,)), RuntimeError,
     r"cannot trace the connected Loop; use torch\.export"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


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


PASSES = [
    (all_but([1]), RuntimeError, "layer 2 of Loop.blocks was called after 1 layers; .*LayerDrop"),
    (all_but([2]), RuntimeError, "2 of 3 layers of Loop.blocks ran; .*LayerDrop"),
    (all_but([0, 1, 2]), RuntimeError, "0 of 3 layers of Loop.blocks ran; .*LayerDrop"),
    (Loop(lambda blocks, x: every([b for b in blocks for _ in range(2)], x)), RuntimeError,
     "layer 0 of Loop.blocks was called after 1 layers; .* once and in its order"),
    (Loop(lambda blocks, x: every([blocks[k] for k in range(3)], x)), RuntimeError,
     "forward of Loop, 0 of 3 layers .* must loop over the list, not over indices"),
    (Loop(lambda blocks, x: next(blocks.children())(x)), RuntimeError,
     "forward of Loop, 0 of 3 layers of Loop.blocks ran; .* was replaced"),
    (Loop(lambda blocks, x: every([b.forward for b in blocks], x)), RuntimeError,
     "0 of 3 layers of Loop.blocks ran; .* as layer"),
    (Loop(lambda blocks, x: every(blocks[1:], x)), RuntimeError, "layer 1 .* after 0 layers"),
    (Loop(lambda blocks, x: every(blocks[:-1], x)), RuntimeError, "2 of 3 layers"),
    (Loop(lambda blocks, x: every(blocks[::-1], x)), RuntimeError, "layer 2 .* after 0 layers"),
    (Loop(lambda blocks, x: every(reversed(blocks), x)), RuntimeError, "layer 2 .* in its order"),
    (Loop(lambda blocks, x: next(iter(blocks))()), TypeError,
     "layer 0 of Loop.blocks was called without x, its first argument"),
    (Loop(lambda blocks, x: every(
        [lambda x, b=b: checkpoint(b, x, use_reentrant=True) for b in blocks],
        x.clone().requires_grad_(),
    )), RuntimeError, "use use_reentrant=False"),
    (second(lambda x: None), TypeError, "output of layer 1 .* got NoneType"),
    (second(lambda x: {"x": x}), TypeError, "output of layer 1 .* got dict"),
    (second(lambda x: ()), TypeError, "got tuple"),
    (second(lambda x: x[:1]), ValueError, rf"must be \(2, 5, {D}\), got \(1, 5, {D}\)"),
    (second(lambda x: x[..., :8]), ValueError,
     rf"output of layer 1 .* \(2, 5, {D}\), got \(2, 5, 8\)"),
    (longer(), RuntimeError, "Loop.blocks has another number of layers, since"),
]  # fmt: skip


@pytest.mark.parametrize(("parent", "error", "words"), PASSES)
def test_passes(parent, error, words):
    if not hasattr(parent, "depth_connection"):
        connect(parent, norm="pre")
    with pytest.raises(error, match=words):
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


def test_nested_tensors():
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    connect(encoder, norm="post")
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad(), pytest.raises(TypeError, match=r"nested.*enable_nested_tensor=False"):
        encoder(X, src_key_padding_mask=padding)


@pytest.mark.parametrize(("make", "layers"), [(Nested, "transformer.h"), (Outer, "encoder.blocks")])
def test_a_list_below_the_module_that_loops(make, layers):
    torch.manual_seed(0)
    parent, flat = make(), Loop()
    plain = parent(X)
    flat.blocks.load_state_dict(parent.get_submodule(layers).state_dict())
    for module, name in ((parent, layers), (flat, None)):
        connect(module, name, norm="pre")
        module(X).sum().backward()
    assert torch.equal(parent(X), flat(X))
    assert torch.equal(parent.depth_connection.weight.grad, flat.depth_connection.weight.grad)
    disconnect(parent)
    assert torch.equal(parent(X), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in parent.modules())


def test_layers_that_run_without_their_parent_are_warned_of_once():
    outer = inside(done(Loop()))
    told = "layers of Loop.blocks run in training .* forward of Loop does not"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer.encoder(X).sum().backward()
        outer.eval()(X)
    # The copies warn too, but the copy of a layer, which may run on its own, does not.
    copies = [copy.deepcopy(outer), pickle.loads(pickle.dumps(outer)), outer]
    layer = copy.deepcopy(outer.encoder.blocks[0]).train()
    assert len(pickle.dumps(layer)) < len(pickle.dumps(outer)) / 2
    for model in copies:
        with pytest.warns(UserWarning, match=told):
            model.train()(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer(X).sum().backward()
        outer.encoder(X)
        outer(X)
        layer(X)


class Stream(Block):
    """Returns its output and the residual stream, which its loop gives back to it."""

    def forward(self, x, residual):
        return self.linear(x), residual + x


class PassedOn(Block):
    """Returns what its loop passes on, beside its whole output."""

    def forward(self, x, other):
        return x + self.linear(x), other


def streams(blocks, x):
    other = torch.zeros_like(x)
    for block in blocks:
        x, other = block(x, other)
    return x + other


@pytest.mark.parametrize(("parent", "told"), [
    (Loop(), None),
    (Loop(lambda blocks, x: every([lambda x, b=b: x + b(x) for b in blocks], x)),
     r"layer 1 of Loop.blocks gets something else than the output that layer 0"),
    (Loop(streams, layer=Stream), r"layer 1 of Loop.blocks gets a second tensor"),
    (Loop(streams, layer=PassedOn), None),
])  # fmt: skip
def test_a_loop_that_changes_what_its_layers_return_is_warned_of(parent, told):
    connect(parent, norm="pre")
    for context in (torch.enable_grad, torch.inference_mode):
        with context(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            parent(X)
        said = [str(w.message) for w in found]
        assert bool(said) == (told is not None)
        assert all(told in text for text in said[:1])


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_other_norm_than_the_layers_have_is_told(norm_first):
    right, wrong = ("pre", "post") if norm_first else ("post", "pre")
    with pytest.warns(UserWarning, match=f"norm='{wrong}' differs .* norm_first={norm_first}"):
        connect(torch_encoder(norm_first), norm=wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        connect(torch_encoder(norm_first), norm=right)
        connect(torch_encoder(norm_first), norm=None)


class Wide(Block):
    """A layer of another class."""

    def forward(self, x, scale=1.0):
        return super().forward(x * scale)


def test_stand_ins_are_taken_for_their_layers():
    """By their class, in a set, and where a loop sets an attribute."""

    def run(blocks, x):
        for k, block in enumerate(blocks):
            assert block != object()
            block.number = k
            special = isinstance(block, Wide) and block in parent.special
            x = block(x, scale=3.0) if special else block(x)
        return x

    parent = Loop(run)
    parent.blocks[1] = Wide()
    parent.special = {parent.blocks[1]}
    plain = parent(X)
    connect(parent, norm="pre", connection="denseformer")
    assert torch.equal(parent(X), plain)
    assert [block.number for block in parent.blocks] == [0, 1, 2]
    parent.forward = lambda x: nn.Sequential(*parent.blocks)(x)
    assert parent(X).shape == X.shape


class CallsItself(Loop):
    def forward(self, x, again=True):
        return super().forward(self(x, False) if again else x)


def _interrupt(_):
    raise KeyboardInterrupt


def test_a_parent_that_calls_itself_connects_both_passes():
    torch.manual_seed(0)
    parent, once = CallsItself(), Loop()
    once.load_state_dict(parent.state_dict())
    for module in (parent, once):
        connect(module, norm="pre")
    assert torch.equal(parent(X), once(once(X)))
    # An interrupt leaves a pass open. The next one is not taken for a pass inside of it.
    parent.blocks[1] = Other(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        parent(X, False)
    parent.blocks[1] = Block()
    parent(X)
    assert parent.blocks.attachment.current.pass_ is None


def test_a_connection_that_was_removed_or_replaced():
    parent = Loop()
    connection = connect(parent, norm="pre")
    parent.depth_connection = nn.Identity()
    with pytest.raises(RuntimeError, match="depth_connection of Loop has been removed or replaced"):
        parent(X)
    del parent.depth_connection
    with pytest.raises(RuntimeError, match="has been removed or replaced"):
        parent(X)
    parent.depth_connection = connection
    parent(X)
    del parent.depth_connection
    disconnect(parent)
    parent(X)


def test_evaluation_of_torchs_encoder_under_autocast():
    """Its fast path returns 16 bits."""
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    plain = encoder(X)
    connect(encoder, norm="post", connection="denseformer")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(X).float(), plain, rtol=0.1, atol=0.1)
