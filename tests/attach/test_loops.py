"""A connected loop: how it treats its layers, what it warns of, and its copies, devices, threads,
modes and passes."""

import copy
import functools
import gc
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from deepfast import connect, disconnect
from deepfast.attach.passes import CONNECT_POLICIES, NAME
from tests.attach import models
from tests.attach.models import CASES, READS, Block, Loop, X, connected_loop, every, gradients
from tests.attach.test_refusals import done


@pytest.mark.filterwarnings("error")
def test_layers_that_run_without_their_parent_are_warned_of_once():
    outer = models.Outer(done(Loop()))
    outer.encoder(X).sum().backward()
    outer.eval()(X)
    # A copy warns too, but the copy of a layer, which may run on its own, does not.
    layer = copy.deepcopy(outer.encoder.blocks[0]).train()
    assert len(pickle.dumps(layer)) < len(pickle.dumps(outer)) / 2
    for model in (copy.deepcopy(outer), outer):
        with pytest.warns(UserWarning, match=r"layers of Loop.blocks run in training .* does not"):
            model.train()(X)
    outer(X).sum().backward()
    outer.encoder(X)
    outer(X)
    layer(X)


RESIDUAL = functools.partial(every, call=lambda block, x: x + block(x))
# It returns its output and the residual stream, which its loop gives back to it.
STREAM = models.does(lambda m, x, residual: (m.linear(x), residual + x))
# It returns what its loop passes on, beside its whole output.
PASSED_ON = models.does(lambda m, x, other: (x + m.linear(x), other))


def streams(blocks, x):
    other = torch.zeros_like(x)
    for block in blocks:
        x, other = block(x, other)
    return x + other


@pytest.mark.parametrize(("parent", "told"), [
    (Loop(), None),
    (Loop(RESIDUAL), r"layer 1 of Loop.blocks gets something else than the output that layer 0"),
    (Loop(streams, layer=STREAM), r"layer 1 of Loop.blocks gets a second tensor"),
    (Loop(streams, layer=PASSED_ON), None),
])  # fmt: skip
def test_a_loop_that_changes_what_its_layers_return_is_warned_of(parent, told):
    connect(parent, norm="pre")
    for context in (torch.enable_grad, torch.inference_mode):
        with context(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            parent(X)
        assert bool(found) == (told is not None)
        assert all(told in str(w.message) for w in found[:1])


@pytest.mark.filterwarnings("error")
def test_the_other_norm_than_the_layers_have_is_told():
    for norm_first, right, wrong in ((False, "post", "pre"), (True, "pre", "post")):
        with pytest.warns(UserWarning, match=f"norm='{wrong}' differs .* norm_first={norm_first}"):
            connect(models.torch_encoder(norm_first), norm=wrong)
        connect(models.torch_encoder(norm_first), norm=right)
        connect(models.torch_encoder(norm_first), norm=None)


def test_stand_ins_are_taken_for_their_layers():
    """By their class, in a set, and where a loop sets an attribute."""

    def run(blocks, x):
        for k, block in enumerate(blocks):
            assert isinstance(block, Block)
            assert block in known
            assert block != object()
            block.number = k
            x = block(x)
        return x

    parent = done(Loop(run))
    known = {*parent.blocks}
    assert parent(X).shape == X.shape
    assert [block.number for block in parent.blocks] == [0, 1, 2]
    parent.forward = lambda x: nn.Sequential(*parent.blocks)(x)
    assert parent(X).shape == X.shape


def test_a_connection_that_was_removed_or_replaced_and_a_list_that_grew():
    parent = done(Loop())
    words = "depth_connection of Loop has been removed or .*Loop.blocks has another number of layer"
    connection, parent.depth_connection = parent.depth_connection, nn.Identity()
    with pytest.raises(RuntimeError, match=words):
        parent(X)
    parent.depth_connection = connection
    parent(X)
    parent.blocks.append(Block())
    with pytest.raises(RuntimeError, match=words):
        parent(X)
    del parent.depth_connection
    disconnect(parent)
    parent(X)


def test_the_list_outside_of_forward():
    blocks, sequential = connected_loop().blocks, done(nn.Sequential(*(Block() for _ in range(4))))
    assert sequential.depth_connection in set(sequential.children())
    for layers, kind in ((blocks, nn.ModuleList), (sequential, nn.Sequential)):
        assert len(layers) == 4
        assert type(layers[1:]) is kind
        assert [type(layer) for layer in (*layers, layers[-1])] == [Block] * 5


def test_parameters_are_made_on_the_device_of_the_layers():
    attention = {"connection": "attnres", "sublayers": [("norm", "linear")], "additive": "gated"}
    for options in ({}, {"dtype": torch.float64}, attention):
        model = Loop().to("meta", torch.bfloat16)
        made = connect(model, norm="pre", **options)
        wanted = "meta", options.get("dtype", torch.float32)
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {wanted}
        model(X.to("meta", torch.bfloat16)).sum().backward()
        assert all(p.grad.is_meta for p in made.parameters())


@pytest.mark.parametrize(("name", "options"), [
    ("torch pre-norm", READS), ("sequential", {}), ("t5", READS),
])  # fmt: skip
def test_copies(name, options):
    """Nothing but the connection is new. A copy has its own one, and is the plain model without."""
    case = CASES[name]
    plain, model = case.make().eval(), case.connected(**options).eval()
    assert plain.state_dict().keys() < model.state_dict().keys()
    new = model.state_dict().keys() - plain.state_dict().keys()
    assert all(f"{NAME}." in name for name in new)
    twins, wanted = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))], case.run(model)
    with torch.no_grad():
        for connection in case.connections(model):
            for p in connection.parameters():
                p.add_(1)
    assert not torch.equal(case.run(model), wanted)
    for twin in twins:
        assert torch.equal(case.run(twin), wanted)
        case.disconnect(twin)
        assert repr(twin) == repr(plain)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
        plain.load_state_dict(twin.state_dict())
        assert torch.equal(case.run(twin), case.run(plain))


@pytest.mark.parametrize("recompute", CONNECT_POLICIES)
def test_gradients_of_two_losses_from_one_pass(recompute):
    """With inplace=False; without it the second one is an error, which names the option."""
    model = connected_loop(recompute=recompute, inplace=False)
    out, parameters = model(X), list(model.parameters())
    losses = out.square().sum(), out[..., 0].sum()
    first, second = (torch.autograd.grad(s, parameters, retain_graph=True) for s in losses)
    both = torch.autograd.grad(sum(losses), parameters)
    torch.testing.assert_close(both, tuple(a + b for a, b in zip(first, second, strict=True)))
    loss = connected_loop(recompute=recompute)(X).sum()
    loss.backward(retain_graph=True)
    words = r"a second backward through one forward pass.*deepfast\.connect\(\.\.\., inplace=False"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_pass_that_ends_in_a_layer(error):
    """Ctrl-C skips torch's hooks. The next pass begins afresh, and nothing of the old one stays."""
    model, seen = connected_loop(), []
    wanted = gradients(model, model(X))

    def fail(_module, _args, out):
        seen.append(weakref.ref(out))
        raise error

    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(error):
        model(X)
    handle.remove()
    current = model.blocks.attachment.current
    assert current.pass_ is None or error is KeyboardInterrupt
    models.assert_equal(gradients(model, model(X)), wanted)
    assert current.pass_ is None
    gc.collect()
    assert seen[0]() is None


def test_threads():
    """Also where they have no gradients."""
    model = connected_loop()
    inputs = [X + k for k in range(4)]
    wanted = [model(x).detach() for x in inputs]
    # Every thread is inside its pass while the others are.
    barrier = threading.Barrier(len(inputs))

    def wait(*_):
        barrier.wait(timeout=30)

    model.blocks[1].register_forward_hook(wait)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        run = mode()(lambda x: model(x))
        with ThreadPoolExecutor(len(inputs)) as pool:
            for found, out in zip(pool.map(run, inputs), wanted, strict=True):
                assert torch.equal(found, out)
                assert found.requires_grad == (mode is torch.enable_grad)


@pytest.mark.parametrize(("name", "options"), [
    ("torch pre-norm", READS), ("torch pre-norm", models.GATED), ("torch post-norm", {}),
])  # fmt: skip
def test_the_fast_path_of_torch(name, options):
    """In evaluation it runs no modules of a layer, and under autocast torch's encoder returns 16
    bits from its first layer on."""
    case = CASES[name]
    model = case.connected(**options)
    wanted = case.run(model)
    with torch.no_grad():
        torch.testing.assert_close(case.run(model.eval()), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(case.run(model).float(), wanted, rtol=0.1, atol=0.1)
