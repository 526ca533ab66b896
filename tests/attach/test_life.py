"""A connected model's life: copies, devices, passes at the same time, autocast, checkpointing."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.models import (
    AGAIN,
    CASES,
    READS,
    Block,
    D,
    Loop,
    X,
    assert_equal,
    connected_loop,
    gradients,
)

POLICIES = ["none", *AGAIN]


@pytest.mark.parametrize("given", [{}, {"dtype": torch.float64}])
def test_parameters_are_made_on_the_device_of_the_layers(given):
    model = Loop().to("meta", torch.bfloat16)
    attention = {"connection": "attnres", "sublayers": [("norm", "linear")], "additive": "gated"}
    for options in ({}, attention):
        made = deepfast.connect(model, norm="pre", **options, **given)
        wanted = "meta", given.get("dtype", torch.float32)
        assert {(p.device.type, p.dtype) for p in made.parameters()} == {wanted}
        model(X.to("meta", torch.bfloat16)).sum().backward()
        assert all(p.grad.is_meta for p in made.parameters())
        deepfast.disconnect(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize(
    ("name", "options"),
    [("torch pre-norm", READS), ("sequential", {}), ("bert", {}), ("timm", READS), ("t5", READS)],
)
def test_copies(name, options, copied):
    case = CASES[name]
    model = case.connected(**options).eval()
    twin = copied(model)
    wanted = case.run(model)
    assert torch.equal(case.run(twin), wanted)
    # The copy has its own connection.
    with torch.no_grad():
        for connection in case.connections(model):
            for p in connection.parameters():
                p.add_(1)
    assert torch.equal(case.run(twin), wanted)
    assert not torch.equal(case.run(model), wanted)
    case.disconnect(twin)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    case.run(twin)


def test_two_passes_before_a_backward():
    model = connected_loop()
    first, second = (gradients(model, model(x)) for x in (X, X + 1))
    both = gradients(model, model(X), model(X + 1))
    for name in both.keys() - {"output"}:
        torch.testing.assert_close(both[name], first[name] + second[name])


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
    # Without that option a second backward is an error.
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

        def run(x, mode=mode):
            with mode():
                return model(x)

        with ThreadPoolExecutor(len(inputs)) as pool:
            for found, out in zip(pool.map(run, inputs), wanted, strict=True):
                assert torch.equal(found, out)
                assert found.requires_grad == (mode is torch.enable_grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("bert", {}), ("bart", {"recompute": "layer"}), ("modernbert", {"recompute": "layer+input"}),
     ("llama", {}), ("llama", {"recompute": "layer+input"}), ("vit", {}), ("t5", READS),
     ("gpt_neox", READS), ("whisper", READS), ("modernbert", READS)],
)  # fmt: skip
def test_checkpointing_of_transformers(name, options, reentrant):
    """The policies make it useless, but it is right. Reads of sublayers need the other kind."""
    case = CASES[name]
    model = case.connected(**options).train()
    wanted = gradients(model, case.run(model))
    if reentrant:
        # Its inputs must need gradients.
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and "sublayers" in options:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            gradients(model, case.run(model))
    else:
        torch.testing.assert_close(gradients(model, case.run(model)), wanted)


def test_autocast_keeps_the_states_in_float32():
    """But the fast path of evaluation of torch's encoder returns 16 bits."""
    model = Loop()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(X)
        deepfast.connect(model, norm="pre", connection="denseformer")
        out = model(X)
        assert out.dtype == torch.float32
        assert torch.equal(out, plain)
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    plain = encoder(X)
    deepfast.connect(encoder, norm="post", connection="denseformer")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(X).float(), plain, rtol=0.1, atol=0.1)
