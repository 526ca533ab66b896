"""How a connected loop treats its layers, and what it warns of."""

import copy
import pickle
import signal
import warnings

import pytest
import torch
from torch import nn

from deepfast import connect, disconnect
from tests.attach.models import Block, Loop, X, connected_loop, every, torch_encoder
from tests.attach.test_refusals import Nested, Outer, done


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
    outer = Outer(done(Loop()))
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


def residual(blocks, x):
    return every([lambda x, b=b: x + b(x) for b in blocks], x)


@pytest.mark.parametrize(("parent", "told"), [
    (Loop(), None),
    (Loop(residual), r"layer 1 of Loop.blocks gets something else than the output that layer 0"),
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("norm_first", "right", "wrong"), [
    (False, "post", "pre"), (True, "pre", "post"),
])  # fmt: skip
def test_the_other_norm_than_the_layers_have_is_told(norm_first, right, wrong):
    with pytest.warns(UserWarning, match=f"norm='{wrong}' differs .* norm_first={norm_first}"):
        connect(torch_encoder(norm_first), norm=wrong)
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


def test_a_parent_that_calls_itself_connects_both_passes():
    torch.manual_seed(0)
    parent, once = CallsItself(), Loop()
    once.load_state_dict(parent.state_dict())
    for module in (parent, once):
        connect(module, norm="pre")
    assert torch.equal(parent(X), once(once(X)))
    # An interrupt leaves a pass open. The next one is not taken for a pass inside of it.
    handle = parent.blocks[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        parent(X, False)
    handle.remove()
    parent(X)
    assert parent.blocks.attachment.current.pass_ is None


def test_a_connection_that_was_removed_or_replaced():
    parent = Loop()
    connection = connect(parent, norm="pre")
    parent.depth_connection = nn.Identity()
    with pytest.raises(RuntimeError, match="depth_connection of Loop has been removed or replaced"):
        parent(X)
    parent.depth_connection = connection
    parent(X)
    del parent.depth_connection
    disconnect(parent)
    parent(X)


def test_the_list_outside_of_forward():
    model = connected_loop()
    assert len(model.blocks) == 4
    assert type(model.blocks[1:]) is nn.ModuleList
    assert [type(block) for block in model.blocks] == [Block] * 4
    sequential = nn.Sequential(Block(), Block())
    connection = connect(sequential, norm="pre")
    assert len(sequential) == 2
    assert type(sequential[:1]) is nn.Sequential
    assert isinstance(sequential[-1], Block)
    assert connection in set(sequential.children())
