"""A read for each sublayer of somebody else's layer, against the literal loop over sublayers."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import deepfast
from tests.attach import layers
from tests.attach.layers import NAMES, Checkpointed, CheckpointedParts, TwoParts, connected
from tests.attach.models import Loop, X, perturbed, torch_encoder
from tests.specifications.attention_residuals import full


def literal(model, x, query, gamma=None):
    """x_r = sum_k softmax_k(q_r . RMSNorm(v_k)) v_k: v_0 is x, and each sublayer adds one. With
    gamma x_r = sum_k v_k + gamma_r times that."""
    states = [x]

    def read():
        row = len(states) - 1
        found = full(states, query, row)
        return found if gamma is None else sum(states) + gamma[row] * found

    for layer in model.blocks:
        for part in layer.parts():
            states.append(part(read))
    return read()


def both(model):
    """Output and gradients of a connected model, and those of the literal loop."""
    x = X.double().requires_grad_()
    plain = copy.deepcopy(model)
    connection = plain.depth_connection
    query, gamma = connection.query, getattr(connection, "gamma", None)
    deepfast.disconnect(plain)
    found = []
    own = [*plain.parameters(), query, *([] if gamma is None else [gamma])]
    if hasattr(connection, "gamma") and gamma is None:
        gamma = torch.ones(connection.rows)
    for out in (model(x), literal(plain, x, query, gamma)):
        parameters = own if found else [*model.parameters()]
        grads = torch.autograd.grad(out.square().mean(), [x, *parameters])
        found.append([out.detach(), *grads])
    return found


@pytest.mark.parametrize("recompute", ["none", "layer", "layer+input"])
def test_same_as_the_literal_loop(recompute):
    got, wanted = both(connected(recompute=recompute))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_a_layer_that_checkpoints_itself():
    got, wanted = both(connected(Checkpointed))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    with pytest.raises(RuntimeError, match="connect it with recompute='none'"):
        both(connected(Checkpointed, recompute="layer"))


class Nested(TwoParts):
    """Its second sublayer is a connected model."""

    def __init__(self):
        super().__init__()
        self.mlp = Loop(layers=2, layer=TwoParts)
        deepfast.connect(self.mlp, norm="pre", connection="attnres", sublayers=NAMES)


SUMS = ("norm1", None), ("norm2", None)


@pytest.mark.parametrize(("layer", "sublayers"), [
    (layers.SideBySide, [(("norm1", "norm2"), None)]),
    (layers.Differences, SUMS),
    (layers.Flat, SUMS),
    (layers.Flat, NAMES),
    (layers.Gated, SUMS),
    (layers.AddsInPlace, (("norm1", "attn"), ("norm2", "mlp"))),
    (layers.ByKeyword, NAMES),
    (Nested, NAMES),
])  # fmt: skip
def test_other_layers(layer, sublayers):
    got, wanted = both(connected(layer, sublayers))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_blocks_of_layers_and_several_passes():
    """Two passes in flight, whose backward passes run in the same order."""
    model = connected(connection="block_attnres", block=2, recompute="layer")
    x, y = X.double().requires_grad_(), -X.double().requires_grad_()
    wanted = [
        torch.autograd.grad(model(z).square().mean(), model.blocks[0].norm1.weight) for z in (x, y)
    ]
    outs = [model(z) for z in (x, y)]
    got = [torch.autograd.grad(out.square().mean(), model.blocks[0].norm1.weight) for out in outs]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_checkpoints_of_sublayers(which):
    model = connected(CheckpointedParts)
    for block in model.blocks:
        block.first, block.second = which
    got, wanted = both(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    assert model.blocks.attachment.current.thread.layer_run is None
    # A sublayer alone runs as ever.
    assert model.blocks[0].mlp(X.double()).shape == X.shape


@pytest.mark.parametrize("options", [
    {}, {"recompute": "layer"}, {"recompute": "layer+input"}, {"additive": "gated"},
    {"additive": "gated", "recompute": "layer"},
])  # fmt: skip
@pytest.mark.parametrize("what", ["step", "forward", "error"])
def test_nothing_is_left_of_a_pass(options, what):
    model, kept = connected(**options), []
    hook = model.depth_connection.register_forward_hook(
        lambda _m, args, _out: kept.append(weakref.ref(args[1].depth_pass))
    )
    if what == "error":
        model.blocks[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            out = model(X.double().requires_grad_())
            if what == "step":
                out.sum().backward()
            del out
    hook.remove()
    gc.collect()
    assert kept
    assert all(state() is None for state in kept)


# A layer that checkpoints itself needs recompute="none".
@pytest.mark.only_if(lambda layer, options: "recompute" not in options
                     or not issubclass(layer, Checkpointed | CheckpointedParts))  # fmt: skip
@pytest.mark.parametrize(
    "layer", [TwoParts, Checkpointed, CheckpointedParts, layers.Differences, layers.Flat]
)
@pytest.mark.parametrize("options", [
    {"additive": "gated"}, {"additive": "one"}, {"additive": "gated", "recompute": "layer"},
])  # fmt: skip
def test_added_to_the_layers_own_sums(layer, options):
    got, wanted = both(connected(layer, SUMS if layer is layers.Differences else NAMES, **options))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_gates_begin_at_0():
    gates = connected(additive="gated").depth_connection
    assert gates.gamma.any()
    gates.reset_parameters()
    assert not gates.gamma.any()


@pytest.mark.parametrize("options", [{}, {"additive": "gated"}])
@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole, options):
    torch._dynamo.reset()
    model = connected(**options)
    wanted, _ = both(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if whole else model
    for block in () if whole else model.blocks:
        block.compile(backend="aot_eager")
    x = X.double().requires_grad_()
    out = run(x)
    grads = torch.autograd.grad(out.square().mean(), [x, *model.parameters()])
    torch.testing.assert_close([out.detach(), *grads], wanted, rtol=0, atol=1e-11)


def test_copies_and_disconnect():
    model = connected()
    wanted = model(X.double())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.blocks[0].norm1 = nn.Identity()
        assert torch.equal(twin(X.double()), wanted)
        deepfast.disconnect(twin)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())


def test_torch_layers_in_training_and_evaluation():
    """torch's fast path of evaluation runs no modules of a layer."""
    model = perturbed(torch_encoder(norm_first=True))
    deepfast.connect(model, norm="pre", connection="attnres", sublayers="auto")
    perturbed(model.depth_connection)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X), model.train()(X))


def test_a_connected_model_in_a_layer_stays():
    model = connected(Nested)
    inner = model.blocks[0].mlp
    before = inner(X.double())
    deepfast.disconnect(model)
    assert torch.equal(inner(X.double()), before)


def test_a_layer_that_stands_in_two_places():
    torch.manual_seed(0)
    model = perturbed(Loop(layer=TwoParts)).double()
    model.blocks[2] = model.blocks[0]
    perturbed(deepfast.connect(model, norm="pre", connection="attnres", sublayers=NAMES).double())
    got, wanted = both(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    model.blocks[0].norm1 = nn.Identity()
    copy.deepcopy(model)
