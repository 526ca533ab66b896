"""A read for each sublayer of somebody else's layer, against the literal loop over sublayers."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.reference.attention_residuals import full
from tests.attach.models import D, Loop, X, perturbed, torch_encoder


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x).tanh()


class TwoParts(nn.Module):
    """A layer whose second sublayer is scaled behind its module."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(D),
            Part(),
            nn.LayerNorm(D),
            Part(),
        )

    def parts(self):
        return (
            lambda read: self.attn(self.norm1(read())),
            lambda read: 0.5 * self.mlp(self.norm2(read())),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


class Checkpointed(TwoParts):
    """Checkpoints itself, as layers of transformers do."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


NAMES = ("norm1", "attn"), ("norm2", None)


def connected(layer=TwoParts, sublayers=NAMES, **options):
    """In float64, always with the same parameters."""
    torch.manual_seed(0)
    model = perturbed(Loop(layer=layer)).double()
    options = {"norm": "pre", "connection": "attnres"} | options
    made = deepfast.connect(model, sublayers=sublayers, **options).double()
    perturbed(made)
    return model


def literal(model, x, query):
    """x_r = sum_k softmax_k(q_r . RMSNorm(v_k)) v_k: v_0 is x, and each sublayer adds one."""
    states = [x]
    for layer in model.blocks:
        for part in layer.parts():
            states.append(part(lambda: full(states, query, len(states) - 1)))
    return full(states, query, len(states) - 1)


def both(model):
    """Output and gradients of a connected model, and those of the literal loop."""
    x = X.double().requires_grad_()
    plain = copy.deepcopy(model)
    query = plain.depth_connection.query
    deepfast.disconnect(plain)
    found = []
    for out in (model(x), literal(plain, x, query)):
        parameters = [*plain.parameters(), query] if found else [*model.parameters()]
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
    with pytest.raises(RuntimeError, match="checkpoints itself needs"):
        both(connected(Checkpointed, recompute="layer"))


class SideBySide(TwoParts):
    def parts(self):
        def both(read):
            x = read()
            return self.attn(self.norm1(x)) + self.mlp(self.norm2(x))

        return (both,)

    def forward(self, x):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))


class Differences(TwoParts):
    """All of its sublayers are scaled behind their modules."""

    def parts(self):
        first, second = super().parts()
        return lambda read: 2 * first(read), second

    def forward(self, x):
        x = x + 2 * self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("layer", "sublayers"),
    [(SideBySide, [(("norm1", "norm2"), None)]), (Differences, [("norm1", None), ("norm2", None)])],
)
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


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole):
    torch._dynamo.reset()
    model = connected()
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


# ---- what is refused -----------------------------------------------------------------------------


class Swapped(TwoParts):
    def forward(self, x):
        x = x + self.mlp(self.norm2(x))
        return x + self.attn(self.norm1(x))


class Skips(TwoParts):
    def forward(self, x):
        return x + self.mlp(self.attn(self.norm1(x)))


class Twice(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return super().forward(x)


class NormAgain(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(x)) + self.norm1(x)
        return x + self.mlp(self.norm2(x))


class Scales(TwoParts):
    def forward(self, x):
        return super().forward(2 * x)


class NoAttention(TwoParts):
    def forward(self, x):
        x = x + self.norm1(x)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Swapped, "the sublayer behind norm1 of layer 0 did not run before the next one"),
        (Skips, "the sublayer behind norm2 of layer 0 did not run"),
        (Twice, "the sublayer behind norm1 of layer 0: its last module runs twice|runs twice in"),
        (NormAgain, "the sublayer behind norm1 of layer 0 runs twice in one call of the layer"),
        (Scales, r"layer 0 of Loop.blocks changes its input before its first norm"),
        (NoAttention, "the sublayer behind norm1 of layer 0: attn did not run"),
    ],
)
def test_layers_that_do_something_else(layer, message):
    model = connected(layer)
    with pytest.raises(RuntimeError, match=message):
        model(X.double())
    # Nothing is left behind.
    deepfast.disconnect(model)
    assert model.blocks[0](X.double()).shape == X.shape


@pytest.mark.parametrize(
    ("sublayers", "options", "error", "message"),
    [
        ("auto", {}, ValueError, "sublayers='auto' knows LlamaDecoderLayer, .*; TwoParts is none"),
        ("all", {}, TypeError, "sublayers must be 'auto' or a pair .*, got 'all'"),
        ((), {}, TypeError, r"sublayers must be 'auto' or a pair .*, got \(\)"),
        (("norm1", "attn"), {}, TypeError, "sublayers must be 'auto' or a pair"),
        (
            [("norm1", "attn"), ("norm3", "mlp")],
            {},
            ValueError,
            "sublayers: TwoParts has no module 'norm3'; its modules are norm1, attn, norm2, mlp",
        ),
        ([("norm1", "attn"), ("norm2", "attn")], {}, ValueError, "'attn' stands in two places"),
        (NAMES, {"connection": "dlcl"}, ValueError, "sublayers needs attention residuals"),
        (NAMES, {"norm": "post"}, ValueError, "needs norm='pre', got 'post'"),
        (NAMES, {"reads": 2}, ValueError, "expected sublayers= in place of reads=, got reads=2"),
    ],
)
def test_arguments(sublayers, options, error, message):
    with pytest.raises(error, match=message):
        connected(sublayers=sublayers, **options)
