"""A read for each sublayer of somebody else's layer, against the literal loop over sublayers."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.attach.reads import RUNNING
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


class CheckpointedParts(TwoParts):
    """Checkpoints both of its sublayers, or one of them, with their norms."""

    first = second = True

    def forward(self, x):
        def part(module, norm, x, again):
            run = lambda x: module(norm(x))  # noqa: E731
            return checkpoint(run, x, use_reentrant=False) if again else run(x)

        x = x + part(self.attn, self.norm1, x, self.first)
        return x + 0.5 * part(self.mlp, self.norm2, x, self.second)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_checkpoints_of_sublayers(which):
    model = connected(CheckpointedParts)
    for block in model.blocks:
        block.first, block.second = which
    got, wanted = both(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    assert RUNNING.layer is None
    assert RUNNING.again == []
    # A sublayer alone runs as ever.
    assert model.blocks[0].mlp(X.double()).shape == X.shape


class Gated(TwoParts):
    """Reads its input besides the norm."""

    def parts(self):
        def first(read):
            x = read()
            return x.mean(-1, keepdim=True).sigmoid() * self.attn(self.norm1(x))

        return first, super().parts()[1]

    def forward(self, x):
        x = x + x.mean(-1, keepdim=True).sigmoid() * self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


def test_a_layer_that_also_reads_its_input():
    got, wanted = both(connected(Gated, [("norm1", None), ("norm2", None)]))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


class AddsInPlace(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x

    def parts(self):
        return tuple(lambda read, m=m, n=n: m(n(read())) for m, n in (
            (self.attn, self.norm1), (self.mlp, self.norm2)
        ))  # fmt: skip


def test_a_sum_in_place_of_the_layer_s_own():
    got, wanted = both(connected(AddsInPlace, [("norm1", "attn"), ("norm2", "mlp")]))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


class ByKeyword(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(input=x))
        return x + 0.5 * self.mlp(self.norm2(input=x))


def test_norms_that_get_their_input_by_keyword():
    got, wanted = both(connected(ByKeyword))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", [
    {}, {"recompute": "layer"}, {"recompute": "layer+input"}, {"additive": "gated"},
    {"additive": "gated", "recompute": "layer"},
])  # fmt: skip
@pytest.mark.parametrize("what", ["step", "forward", "error"])
def test_nothing_is_left_of_a_pass(options, what):
    model, kept = connected(**options), []
    hook = model.depth_connection.register_forward_hook(
        lambda _m, args, _out: kept.append(weakref.ref(args[1].state))
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


@pytest.mark.parametrize("layer", [TwoParts, Checkpointed, CheckpointedParts, Differences])
@pytest.mark.parametrize("options", [
    {"additive": "gated"}, {"additive": "one"}, {"additive": "gated", "recompute": "layer"},
])  # fmt: skip
def test_added_to_the_layers_own_sums(layer, options):
    names = [("norm1", None), ("norm2", None)] if layer is Differences else NAMES
    if "recompute" in options and issubclass(layer, Checkpointed | CheckpointedParts):
        pytest.skip("a layer that checkpoints itself needs recompute='none'")
    got, wanted = both(connected(layer, names, **options))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_model_begins_as_itself(dtype):
    torch.manual_seed(0)
    model = perturbed(Loop(layer=TwoParts)).to(dtype)
    x = X.to(dtype)
    wanted = model(x)
    options = {"connection": "attnres", "sublayers": NAMES, "additive": "gated"}
    made = deepfast.connect(model, norm="pre", **options)
    assert torch.equal(model(x), wanted)
    # One step moves every gate, though the queries begin at 0.
    model(x).float().square().mean().backward()
    assert (made.gamma.grad != 0).all()
    made.gamma.data.add_(1)
    made.reset_parameters()
    assert not made.gamma.any()


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


class Factor(TwoParts):
    def forward(self, x):
        x = x + 0.5 * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Third(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x + self.mlp.linear(x)


class IntoTheOutput(TwoParts):
    """Adds into what its module returned."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(D, D)

    def forward(self, x):
        h = self.attn(self.norm1(x))
        h += x
        return h + self.mlp(self.norm2(h))


class Transposes(TwoParts):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


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
        (Factor, "behind norm1 of layer 0 adds something else than attn returns"),
        (IntoTheOutput, "the layer modifies in place what attn returned"),
        (Transposes, "changes its input before its first norm"),
        (NoAttention, "the sublayer behind norm1 of layer 0: attn did not run"),
    ],
)
def test_layers_that_do_something_else(layer, message):
    model = connected(layer)
    with pytest.raises(RuntimeError, match=message):
        model(X[:, :2].double())
    # Nothing is left behind.
    deepfast.disconnect(model)
    assert model.blocks[0](X.double()).shape == X.shape


@pytest.mark.parametrize(
    ("layer", "sublayers", "message"),
    [
        (Third, (("norm1", "attn"), ("norm2", "mlp")), "behind norm2 .* else than mlp returns"),
        (Differences, (("norm1", None), ("norm2", "mlp")), "behind norm2 .* else than mlp returns"),
        (TwoParts, (("norm1", "attn"),), "behind norm1 .* else than attn returns"),
        (TwoParts, (("norm1", "attn.linear"), ("norm2", None)), "else than attn.linear returns"),
        (AddsInPlace, (("norm1", "attn"), ("norm2", None)), "behind norm2 .* is added in place"),
        (
            TwoParts,
            ((("norm1", "norm2"), None),),
            "its norms share a read, so they must get one tensor",
        ),
    ],
)
def test_names_that_do_not_fit_the_layer(layer, sublayers, message):
    with pytest.raises(RuntimeError, match=message):
        connected(layer, sublayers)(X.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_misfit(dtype):
    """The sums of a layer in 16 bits, with large inputs."""
    model = connected().to(dtype)
    for scale in (1, 1000):
        model.depth_connection.query.data.zero_()
        assert model(scale * X.to(dtype)).isfinite().all()


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
        (None, {"additive": "gated"}, ValueError, "additive='gated' needs sublayers=, got None"),
        (NAMES, {"additive": "two"}, ValueError, "additive must be one of gated, one, got 'two'"),
        (
            NAMES,
            {"additive": "one", "recompute": "layer+input"},
            ValueError,
            "expected recompute='none' or 'layer', got 'layer\\+input'",
        ),
        (NAMES, {"reads": 2}, ValueError, "expected sublayers= in place of reads=, got reads=2"),
    ],
)
def test_arguments(sublayers, options, error, message):
    with pytest.raises(error, match=message):
        connected(sublayers=sublayers, **options)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x


def shared(layers):
    layers[1].attn = layers[0].attn
    return layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: [TwoParts(), Other()], "sublayers: Other has no module 'norm2'"),
        (lambda: shared([TwoParts(), TwoParts()]), "a Part is a part of two sublayers"),
        (lambda: [*connected().blocks], "a LayerNorm is connected already, in another parent"),
    ],
)
def test_layers_that_do_not_fit_leave_the_model_as_it_was(layers, message):
    model = Loop()
    model.blocks = nn.ModuleList(layers())
    before = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        deepfast.connect(model, norm="pre", connection="attnres", sublayers=NAMES)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before
    assert "depth_connection" not in dict(model.named_children())


class Nested(TwoParts):
    """Its second sublayer is a connected model."""

    def __init__(self):
        super().__init__()
        self.mlp = Loop(layers=2, layer=TwoParts)
        deepfast.connect(self.mlp, norm="pre", connection="attnres", sublayers=NAMES)


def test_a_connected_model_in_a_layer():
    model = connected(Nested)
    got, wanted = both(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
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
