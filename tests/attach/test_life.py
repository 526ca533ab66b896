"""A connected model's life: copies, saved states, passes at the same time, checkpointing."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from tests.attach.models import (
    CASES,
    Block,
    Loop,
    X,
    assert_equal,
    connected_loop,
    gradients,
    perturbed,
)

POLICIES = ["none", "layer", "layer+input"]


@pytest.mark.parametrize("recompute", POLICIES)
def test_on_the_meta_device(recompute):
    model = connected_loop(recompute=recompute).to("meta")
    x = X.to("meta").requires_grad_()
    model(x).sum().backward()
    assert x.grad.is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "dtype"), [({}, torch.float32), ({"dtype": torch.float64}, torch.float64)]
)
def test_parameters_are_made_on_the_device_of_the_layers(given, dtype):
    model = Loop().to("meta", torch.bfloat16)
    attention = {"connection": "attnres", "sublayers": [("norm", "linear")], "additive": "gated"}
    for options in ({}, attention):
        made = deepfast.connect(model, norm="pre", **options, **given)
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", dtype)}
        deepfast.disconnect(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", ["torch pre-norm", "sequential", "bert", "timm"])
def test_copies(name, copied):
    case = CASES[name]
    model = perturbed(case.make())
    connections = case.connect(model)
    twin = copied(model)
    wanted = case.run(model)
    assert torch.equal(case.run(twin), wanted)
    # The copy has its own connection.
    with torch.no_grad():
        for connection in connections.values():
            connection.weight.zero_()
    assert torch.equal(case.run(twin), wanted)
    assert not torch.equal(case.run(model), wanted)
    for _, parent, _ in case.places(twin):
        deepfast.disconnect(parent)
    case.run(twin)


def test_copy_while_a_pass_is_open():
    """As a hook on a layer would do it."""
    model, twins = connected_loop(), []
    handle = model.blocks[1].register_forward_hook(lambda *_: twins.append(copy.deepcopy(model)))
    wanted = model(X)
    handle.remove()
    assert torch.equal(twins[0](X), wanted)


def test_two_passes_before_a_backward():
    model = connected_loop()
    first, second = (gradients(model, model(x)) for x in (X, X + 1))
    both = gradients(model, model(X), model(X + 1))
    torch.testing.assert_close(both, {name: first[name] + second[name] for name in first})


@pytest.mark.parametrize("recompute", POLICIES)
def test_gradients_of_two_losses_from_one_pass(recompute):
    model = connected_loop(recompute=recompute, inplace=False)
    parameters = list(model.parameters())

    def losses():
        out = model(X)
        return out.square().sum(), out[..., 0].sum()

    wanted = [torch.autograd.grad(losses()[i], parameters) for i in (0, 1)]
    first, second = losses()
    got = torch.autograd.grad(first, parameters, retain_graph=True)
    second.backward()
    for p, *grads in zip(parameters, got, *wanted, strict=True):
        torch.testing.assert_close((grads[0], p.grad), (grads[1], grads[2]))


@pytest.mark.parametrize("recompute", POLICIES)
def test_a_second_backward_names_the_option(recompute):
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
    if error is KeyError:
        assert all(isinstance(block, Block) for block in model.blocks)
        gc.collect()
        assert seen[0]() is None
    assert_equal(gradients(model, model(X)), wanted)
    assert all(isinstance(block, Block) for block in model.blocks)
    gc.collect()
    assert seen[0]() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model = connected_loop()
    wanted = model(X)
    with mode():
        assert torch.equal(model(X), wanted)
    assert_equal(gradients(model, model(X)), gradients(model, wanted))


def test_threads():
    model = connected_loop()
    inputs = [X + k for k in range(4)]
    wanted = [model(x).detach() for x in inputs]
    # Every thread is inside its pass while the others are.
    barrier, found = threading.Barrier(len(inputs)), {}

    def wait(*_):
        barrier.wait(timeout=30)

    model.blocks[1].register_forward_hook(wait)

    def run(k):
        found[k] = model(inputs[k])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, out in enumerate(wanted):
        assert torch.equal(found[k], out)


def checkpointed(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


@pytest.mark.filterwarnings("error:deepfast")
@pytest.mark.parametrize("connection", ["dlcl", "denseformer", "attnres"])
def test_checkpointed_calls(connection):
    """The loop checkpoints what it calls, so backward repeats the pushes."""
    model = connected_loop(connection=connection)
    out = model(X)
    wanted = gradients(model, out)
    model.run = checkpointed
    again = model(X)
    assert torch.equal(again, out)
    assert_equal(gradients(model, again), wanted)
    other = model(X + 1)
    assert_equal(gradients(model, model(X)), wanted)
    other.sum().backward()


def test_autocast_keeps_the_states_in_float32():
    model = connected_loop(connection="denseformer", init="identity")
    model.depth_connection.reset_parameters()
    plain = copy.deepcopy(model)
    deepfast.disconnect(plain)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X)
        assert out.dtype == torch.float32
        assert torch.equal(out, plain(X))


def test_the_list_outside_of_forward():
    model = connected_loop()
    assert len(model.blocks) == 4
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[1:]) is nn.ModuleList
    assert [type(block) for block in model.blocks] == [Block] * 4
    sequential = nn.Sequential(Block(), Block())
    connection = deepfast.connect(sequential, norm="pre")
    assert len(sequential) == 2
    assert type(sequential[:1]) is nn.Sequential
    assert isinstance(sequential[-1], Block)
    assert connection in set(sequential.children())
