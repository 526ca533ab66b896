"""A connected model's life: copies, saved states, passes at the same time, checkpointing."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from tests.attach.models import CASES, Block, D, perturbed


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


class Stack(nn.Module):
    """Its own loop, with or without checkpointing around the calls of its layers."""

    def __init__(self, layers=4, reentrant=None, every=1):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))


def connected_stack(**options):
    torch.manual_seed(0)
    model = perturbed(Stack())
    perturbed(deepfast.connect(model, norm="pre", **options))
    return model


def grads(model, *outputs):
    model.zero_grad()
    sum(out.square().sum() for out in outputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("memory", ["keep", "states", "history"])
def test_on_the_meta_device(memory):
    model = connected_stack(memory=memory).to("meta")
    x = X.to("meta").requires_grad_()
    model(x).sum().backward()
    assert x.grad.is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters())


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
    model, twins = connected_stack(), []
    model.blocks[1].register_forward_hook(lambda *_: twins.append(copy.deepcopy(model)))
    wanted = model(X)
    with torch.no_grad():
        del model.blocks[1]._forward_hooks
    assert torch.equal(twins[0](X), wanted)


def test_state_dict():
    model, other = connected_stack(), Stack()
    deepfast.connect(other, norm="pre")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(X), model(X))
    plain = Stack()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert {key.partition(".")[0] for key in unexpected} == {"depth_connection"}


def test_two_passes_before_a_backward():
    model = connected_stack()
    y = X + 1
    first, second = grads(model, model(X)), grads(model, model(y))
    both = grads(model, model(X), model(y))
    for name in both:
        torch.testing.assert_close(both[name], first[name] + second[name])


@pytest.mark.parametrize("memory", ["keep", "states", "history"])
def test_gradients_of_two_losses_from_one_pass(memory):
    model = connected_stack(memory=memory, inplace=False)
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


def test_a_second_backward_names_the_option():
    model = connected_stack()
    out = model(X).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"deepfast\.connect\(\.\.\., inplace=False\)"):
        out.backward()


def test_an_exception_in_a_layer():
    model = connected_stack()
    wanted = grads(model, model(X))

    def fail(*_):
        raise KeyError("the layer")

    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(KeyError, match="the layer"):
        model(X)
    assert all(isinstance(block, Block) for block in model.blocks)
    handle.remove()
    assert_equal(grads(model, model(X)), wanted)


def test_a_failed_pass_is_freed():
    model = connected_stack()
    seen = []

    def fail(_module, _args, out):
        seen.append(weakref.ref(out))
        raise KeyError

    model.blocks[2].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(X)
    gc.collect()
    assert seen[0]() is None


def test_interrupted():
    """Ctrl-C skips torch's hooks; the next pass begins afresh."""
    model = connected_stack()
    wanted = model(X)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert torch.equal(model(X), wanted)
    assert all(isinstance(block, Block) for block in model.blocks)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model = connected_stack()
    wanted = model(X)
    with mode():
        assert torch.equal(model(X), wanted)
    assert_equal(grads(model, model(X)), grads(model, model(X)))


def test_threads():
    model = connected_stack()
    inputs = [X + k for k in range(4)]
    wanted = [model(x).detach() for x in inputs]
    # Every thread is inside its pass while the others are.
    barrier, found, failed = threading.Barrier(len(inputs)), {}, []

    def wait(*_):
        barrier.wait(timeout=30)

    model.blocks[1].register_forward_hook(wait)

    def run(k):
        try:
            found[k] = model(inputs[k])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for k, out in enumerate(wanted):
        assert torch.equal(found[k], out)


@pytest.mark.filterwarnings("error:deepfast")
@pytest.mark.parametrize("connection", ["dlcl", "denseformer", "attnres"])
def test_checkpointed_calls(connection):
    """The loop checkpoints what it calls, so backward repeats the pushes."""
    model = connected_stack(connection=connection)
    out = model(X)
    wanted = grads(model, out)
    model.reentrant = False
    again = model(X)
    assert torch.equal(again, out)
    assert_equal(grads(model, again), wanted)
    other = model(X + 1)
    mixed = grads(model, model(X))
    assert_equal(mixed, wanted)
    other.sum().backward()


def test_reentrant_checkpointing_of_calls_is_refused():
    model = connected_stack()
    model.reentrant = True
    with pytest.raises(RuntimeError, match="use use_reentrant=False"):
        model(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_and_parent(reentrant):
    """Checkpointing inside of a layer, and around the whole parent, both ways."""
    model = connected_stack()
    x = X.clone().requires_grad_()
    wanted = grads(model, model(x))
    assert_equal(grads(model, checkpoint(model, x, use_reentrant=reentrant)), wanted)
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    assert_equal(grads(model, model(x)), wanted)


def test_timm_checkpoints():
    case = CASES["timm"]
    model = perturbed(case.make())
    case.connect(model)
    wanted = grads(model, case.run(model))
    model.set_grad_checkpointing()
    assert_equal(grads(model, case.run(model)), wanted)


def test_timm_features_without_forward():
    case = CASES["timm"]
    model = perturbed(case.make())
    x = torch.randn(2, 3, 8, 8)
    before = model.forward_features(x)
    case.connect(model)
    after = model.forward_features(x)
    assert not torch.equal(after, before)
    assert torch.equal(model.forward_head(after), model(x))


def test_autocast_keeps_the_states_in_float32():
    model = connected_stack(connection="denseformer", init="identity")
    with torch.no_grad():
        model.depth_connection.reset_parameters()
    plain = copy.deepcopy(model)
    deepfast.disconnect(plain)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X)
        assert out.dtype == torch.float32
        assert torch.equal(out, plain(X))


def test_frozen_model():
    """Only the connection learns."""
    model = connected_stack()
    wanted = grads(model, model(X))
    model.zero_grad()
    model.blocks.requires_grad_(False)
    model(X).square().sum().backward()
    for name, p in model.depth_connection.named_parameters():
        torch.testing.assert_close(p.grad, wanted[f"depth_connection.{name}"])
    assert all(p.grad is None for p in model.blocks.parameters())


def test_the_list_outside_of_forward():
    model = connected_stack()
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
