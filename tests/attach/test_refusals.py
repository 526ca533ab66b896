"""What cannot be connected, and the sentence that says so."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.models import Block, D, torch_encoder


def every(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Loop(nn.Module):
    """Its forward is ``run(blocks, x)``."""

    def __init__(self, run=every, layers=3):
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        return self.run(self.blocks, x)


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


class Other(nn.Module):
    """A layer whose result is ``result(x)``."""

    def __init__(self, result):
        super().__init__()
        self.result, self.norm = result, nn.LayerNorm(D)

    def forward(self, x):
        return self.result(x)


X = torch.randn(2, 5, D)


def all_but(skipped):
    return lambda blocks, x: every((b for k, b in enumerate(blocks) if k not in skipped), x)


LOOPS = {
    "skip": (all_but([1]), "layer 1 of Loop.blocks did not run before layer 2.*LayerDrop"),
    "skip last": (all_but([2]), "a loop over Loop.blocks, 2 of 3 layers ran; .*LayerDrop"),
    "none": (all_but([0, 1, 2]), "a loop over Loop.blocks, 0 of 3 layers ran; .*LayerDrop"),
    "twice": (lambda blocks, x: every([b for b in blocks for _ in range(2)], x),
              "layer 0 of Loop.blocks runs twice in one pass"),
    "by index": (lambda blocks, x: every([blocks[k] for k in range(3)], x),
                 "Loop took layers by index; it must iterate over Loop.blocks"),
    "around": (lambda blocks, x: next(blocks.children())(x),
               "the forward of Loop did not iterate over Loop.blocks; .* was replaced"),
    "forward": (lambda blocks, x: every([b.forward for b in blocks], x),
                "a loop over Loop.blocks, 0 of 3 layers ran; .* as layer"),
    "part": (lambda blocks, x: every(blocks[1:], x), "loops over some of the layers"),
    "backwards": (lambda blocks, x: every(blocks[::-1], x),
                  "some of the layers; .* in their order"),
    "reversed": (lambda blocks, x: every(reversed(blocks), x),
                 "some of the layers; .* in their order"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "message"), LOOPS.values(), ids=LOOPS)
def test_loops_that_leave_layers_out(run, message):
    parent = Loop(run)
    deepfast.connect(parent, norm="pre")
    with pytest.raises(RuntimeError, match=message):
        parent(X)
    # The pass is closed: outside of forward the list has the layers.
    assert all(isinstance(block, Block) for block in parent.blocks)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda x: None, TypeError, "output of layer 1 .* got NoneType"),
        (lambda x: {"x": x}, TypeError, "output of layer 1 .* got dict"),
        (lambda x: x[:1], ValueError, r"shape \(2, 5, 16\), got \(1, 5, 16\)"),
        (lambda x: x[..., :8], ValueError, r"output of layer 1 .* \(..., 16\), got \(2, 5, 8\)"),
        (lambda x: (), TypeError, "got tuple"),
    ],
)
def test_layers_that_return_something_else(result, error, message):
    parent = nn.Sequential(Block(), Other(result), Block())
    deepfast.connect(parent, norm="pre")
    with pytest.raises(error, match=message):
        parent(X)


def test_input_of_another_width():
    parent = Loop()
    deepfast.connect(parent, norm="pre", dim=8)
    with pytest.raises(ValueError, match=r"layer 0 of Loop.blocks must be \(..., 8\).* with dim="):
        parent(X)


def test_nested_tensors():
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    deepfast.connect(encoder, norm="post")
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad(), pytest.raises(TypeError, match=r"nested.*enable_nested_tensor=False"):
        encoder(X, src_key_padding_mask=padding)


def test_twice():
    parent = Loop()
    deepfast.connect(parent, norm="pre")
    with pytest.raises(ValueError, match="Loop is connected already"):
        deepfast.connect(parent, norm="pre")
    outer = Outer()
    outer.encoder = parent
    with pytest.raises(ValueError, match=r"Outer\.encoder\.blocks is connected already"):
        deepfast.connect(outer, "encoder.blocks", norm="pre")


@pytest.mark.parametrize(("make", "layers"), [(Nested, "transformer.h"), (Outer, "encoder.blocks")])
def test_a_list_below_the_module_that_loops(make, layers):
    torch.manual_seed(0)
    parent, flat = make(), Loop()
    plain = parent(X)
    flat.blocks.load_state_dict(parent.get_submodule(layers).state_dict())
    for module, name in ((parent, layers), (flat, None)):
        deepfast.connect(module, name, norm="pre")
        module(X).sum().backward()
    assert torch.equal(parent(X), flat(X))
    assert torch.equal(parent.depth_connection.weight.grad, flat.depth_connection.weight.grad)
    deepfast.disconnect(parent)
    assert torch.equal(parent(X), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in parent.modules())


def test_disconnect_leaves_the_connection_of_a_module_inside():
    outer = Outer()
    deepfast.connect(outer.encoder, norm="pre")
    with pytest.raises(ValueError, match="Outer is not connected; disconnect its encoder"):
        deepfast.disconnect(outer)
    deepfast.disconnect(outer.encoder)


def test_layers_that_run_without_their_parent_are_warned_of_once():
    outer = Outer()
    deepfast.connect(outer.encoder, norm="pre")
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
        layer(X)


def test_layers_added_later():
    parent = Loop()
    deepfast.connect(parent, norm="pre")
    parent.blocks.append(Block())
    with pytest.raises(RuntimeError, match=r"had 3 layers .* has 4 now"):
        parent(X)


def _several():
    parent = Loop()
    parent.others = nn.ModuleList([Block()])
    return parent


def _layerdrop():
    parent = Loop()
    parent.layerdrop = 0.1
    return parent


def _lists():
    parent = Loop()
    parent.blocks = nn.ModuleList([parent.blocks])
    return parent


class Stack(nn.Sequential):
    """A list of a class of its own."""


def _subclass():
    parent = Loop()
    parent.blocks = Stack(*parent.blocks)
    return parent


@pytest.mark.parametrize(
    ("parent", "options", "error", "message"),
    [
        (nn.Linear(D, D), {}, ValueError, "Linear must have one list of layers, got none"),
        (Nested(), {}, ValueError, r"got none; .* layers='transformer.h'"),
        (
            Nested(),
            {"layers": "transformer.g"},
            TypeError,
            "Nested.transformer.g must be an nn.Mod",
        ),
        (Nested().transformer, {}, ValueError, r"ModuleDict has no forward.* 'transformer\.h'"),
        (_several(), {}, ValueError, r"one list of layers, got \['blocks', 'others'\]"),
        (Loop(), {"layers": "nothing"}, TypeError, "Loop.nothing must be an nn.ModuleList"),
        (Loop(), {"layers": 3}, TypeError, "layers must be the name"),
        (Loop(layers=0), {}, ValueError, "Loop.blocks has no layers"),
        (_layerdrop(), {}, ValueError, "Loop.layerdrop is 0.1"),
        (nn.Sequential(nn.Linear(D, D)), {}, ValueError, "cannot be told from Linear.*pass dim="),
        (Loop(), {"norm": "both"}, ValueError, "norm must be"),
        (Loop(), {"connection": "nothing"}, ValueError, "connection must be"),
        (Loop(), {"connection": "mudd"}, ValueError, r"nn\.TransformerEncoder.*connection='mudd'"),
        (Loop(), {"inplace": None}, ValueError, "inplace must be True or False"),
        (Loop(), {"connection": "attnres", "norm": "post"}, ValueError, "needs norm='pre'"),
        (Loop(), {"connection": "attnres", "reads": 2}, ValueError, "reads must be 1"),
        (Loop(), {"window": 0}, ValueError, "window"),
        (
            Loop(),
            {"connection": "denseformer", "norm_kind": "rms"},
            ValueError,
            "'denseformer' has no layer-norms, got norm_kind=",
        ),
        (_lists(), {}, ValueError, "Loop.blocks must be a list of layers, got one of ModuleLists"),
        (_subclass(), {"layers": "blocks"}, TypeError, "none of a subclass, got Stack"),
        ("encoder", {}, TypeError, "parent must be a module, got str"),
    ],
)
def test_parents_and_options(parent, options, error, message):
    with pytest.raises(error, match=message):
        deepfast.connect(parent, **({"norm": "pre"} | options))


def test_disconnect_needs_a_connection():
    with pytest.raises(ValueError, match="Loop is not connected"):
        deepfast.disconnect(Loop())


def test_a_loop_that_changes_what_a_layer_returned_is_warned_of():
    parent = Loop(lambda blocks, x: every([lambda x, b=b: x + b(x) for b in blocks], x))
    deepfast.connect(parent, norm="pre")
    for context in (torch.enable_grad, torch.inference_mode):
        with (
            context(),
            pytest.warns(UserWarning, match="changes what layer 0 returned before it c"),
        ):
            parent(X)


class Streams(Loop):
    """Keeps the residual stream beside what the layers return, or passes on what it got."""

    def forward(self, x):
        residual = self.start = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return x + residual


class Stream(Block):
    def forward(self, x, residual):
        if self.linear.bias is None:
            return x + self.linear(x), residual
        return self.linear(x), residual + x


def test_a_second_stream_is_warned_of():
    parent = Streams()
    parent.blocks = nn.ModuleList(Stream() for _ in range(3))
    deepfast.connect(parent, norm="pre")
    with pytest.warns(UserWarning, match=r"layer 1 of Streams.blocks gets a second tensor"):
        parent(X)
    for block in parent.blocks:
        block.linear.bias = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parent(X)


class Wide(Block):
    """A layer of another class."""

    def forward(self, x, scale=1.0):
        return super().forward(x * scale)


class ByClass(Loop):
    """Calls its layers by their class."""

    def forward(self, x):
        for block in self.blocks:
            assert block != object()
            special = isinstance(block, Wide) and block in self.special
            x = block(x, scale=3.0) if special else block(x)
        return x


def test_stand_ins_have_the_class_of_their_layers():
    parent = ByClass()
    parent.blocks[1] = Wide()
    parent.special = {parent.blocks[1]}
    plain = parent(X)
    deepfast.connect(parent, norm="pre", connection="denseformer")
    assert torch.equal(parent(X), plain)
    parent.forward = lambda x: nn.Sequential(*parent.blocks)(x)
    assert parent(X).shape == X.shape


def test_torch_jit_trace():
    parent = Loop()
    deepfast.connect(parent, norm="pre")
    with pytest.raises(RuntimeError, match=r"cannot trace the connected Loop; use torch\.export"):
        torch.jit.trace(parent, (X,))


@pytest.mark.filterwarnings("error")
def test_a_loop_that_passes_it_on_is_not():
    parent = Loop()
    deepfast.connect(parent, norm="pre")
    parent(X).sum().backward()
    with torch.no_grad():
        parent(X)


def test_attention_residuals_refuse_layers_that_add_in_place():
    parent = Loop()
    parent.blocks[1] = Other(lambda x: x.add_(1))
    deepfast.connect(parent, norm="pre", connection="attnres", dim=D)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"layer 1 of Loop\.blocks modifies its input"),
    ):
        parent(X)


class CallsItself(Loop):
    def forward(self, x, again=True):
        return super().forward(self(x, False) if again else x)


def test_a_parent_that_calls_itself_connects_both_passes():
    torch.manual_seed(0)
    parent, once = CallsItself(), Loop()
    once.load_state_dict(parent.state_dict())
    for module in (parent, once):
        deepfast.connect(module, norm="pre")
    assert torch.equal(parent(X), once(once(X)))
    # An interrupt leaves a pass open. The next one is not taken for a pass inside of it.
    parent.blocks[1] = Other(lambda x: _interrupt())
    with pytest.raises(KeyboardInterrupt):
        parent(X, False)
    parent.blocks[1] = Block()
    parent(X)
    assert parent.blocks.attachment.run is None


def _interrupt():
    raise KeyboardInterrupt


def test_a_connection_that_was_removed_or_replaced():
    parent = Loop()
    connection = deepfast.connect(parent, norm="pre")
    parent.depth_connection = nn.Identity()
    with pytest.raises(RuntimeError, match="depth_connection of Loop has been removed or replaced"):
        parent(X)
    del parent.depth_connection
    with pytest.raises(RuntimeError, match="has been removed or replaced"):
        parent(X)
    parent.depth_connection = connection
    parent(X)
    del parent.depth_connection
    deepfast.disconnect(parent)
    parent(X)


def test_attributes_that_a_loop_sets_are_the_layers():
    class Numbers(Loop):
        def forward(self, x):
            for k, block in enumerate(self.blocks):
                block.number = k
                x = block(x)
            return x

    parent = Numbers()
    deepfast.connect(parent, norm="pre")
    parent(X)
    assert [block.number for block in parent.blocks] == [0, 1, 2]


def test_evaluation_of_torchs_encoder_under_autocast():
    """Its fast path returns 16 bits."""
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    plain = encoder(X)
    deepfast.connect(encoder, norm="post", connection="denseformer")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(X).float(), plain, rtol=0.1, atol=0.1)


def test_disconnect_needs_a_module():
    with pytest.raises(TypeError, match=r"deepfast.disconnect: expected a module, got NoneType"):
        deepfast.disconnect(None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parent": "encoder"}, TypeError, "expected norm="),
        ({"parent": "encoder", "norm": "pots"}, ValueError, "norm must be one of"),
        (
            {"parent": "encoder", "norm": "pre", "memory": "all"},
            ValueError,
            "memory must be one of",
        ),
        ({"norm": "post"}, TypeError, "norm needs parent"),
        ({"connection": "denseformer"}, TypeError, "connection needs parent"),
        ({"window": 2}, TypeError, "window needs parent"),
    ],
)
def test_classes(options, error, message):
    class Pretrained(nn.Module):
        from_pretrained = None

    with pytest.raises(error, match=message):
        deepfast.connected(Pretrained, **options)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_other_norm_than_the_layers_have_is_told(norm_first):
    right, wrong = ("pre", "post") if norm_first else ("post", "pre")
    with pytest.warns(UserWarning, match=f"norm='{wrong}' differs .* norm_first={norm_first}"):
        deepfast.connect(torch_encoder(norm_first), norm=wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepfast.connect(torch_encoder(norm_first), norm=right)
        deepfast.connect(torch_encoder(norm_first), norm=None)
