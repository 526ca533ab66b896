"""Layers and arguments that reads of sublayers refuse."""

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.layers import NAMES, AddsInPlace, Differences, TwoParts, connected
from tests.attach.models import D, Loop, X


def does(forward, attn=None):
    """A class of layers with another forward, and another first part."""

    def init(self):
        TwoParts.__init__(self)
        self.attn = self.attn if attn is None else attn()

    return type("Does", (TwoParts,), {"__init__": init, "forward": forward})


def into_the_output(m, x):
    """Adds into what its module returned."""
    h = m.attn(m.norm1(x))
    h += x
    return h + m.mlp(m.norm2(h))


BOTH = ("norm1", "attn"), ("norm2", "mlp")
FAULTS = {
    "swapped": (
        does(lambda m, x: (h := x + m.mlp(m.norm2(x))) + m.attn(m.norm1(h))), NAMES,
        "the sublayer behind norm2 of layer 0 runs out of turn"),
    "skips": (
        does(lambda m, x: x + m.mlp(m.attn(m.norm1(x)))), NAMES,
        "the sublayer behind norm2 of layer 0 did not run"),
    "runs twice": (
        does(lambda m, x: TwoParts.forward(m, x + m.attn(m.norm1(x)))), NAMES,
        "the sublayer behind norm1 of layer 0 runs twice in one call of the layer"),
    "another use of the norm": (
        does(lambda m, x: (h := x + m.attn(m.norm1(x)) + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
        "behind norm1 of layer 0 adds something else than attn returns"),
    "scales its input": (
        does(lambda m, x: TwoParts.forward(m, 2 * x)), NAMES,
        "layer 0 of Loop.blocks changes its input before its first norm"),
    "transposes": (
        does(lambda m, x: TwoParts.forward(m, x.transpose(0, 1)).transpose(0, 1)), NAMES,
        "changes its input before its first norm"),
    "factor": (
        does(lambda m, x: (h := x + 0.5 * m.attn(m.norm1(x))) + m.mlp(m.norm2(h))), NAMES,
        "behind norm1 of layer 0 adds something else than attn returns"),
    "its last module runs twice": (
        does(lambda m, x: (h := x + m.attn(m.norm1(x)) + 0 * m.attn(x)) + m.mlp(m.norm2(h))),
        NAMES, "behind norm1 of layer 0 has a last module that runs twice",
    ),
    "adds into the output": (
        does(into_the_output, attn=lambda: nn.Linear(D, D)), NAMES,
        "needs None in place of attn, whose output is modified in place"),
    "its last module does not run": (
        does(lambda m, x: (h := x + m.norm1(x)) + m.mlp(m.norm2(h))), NAMES,
        "the sublayer behind norm1 of layer 0 ends before attn has run"),
    "a third sublayer": (
        does(lambda m, x: (h := TwoParts.forward(m, x)) + m.mlp.linear(h)), BOTH,
        "behind norm2 .* else than mlp returns"),
    "a factor behind the module": (
        Differences, (("norm1", None), ("norm2", "mlp")), "behind norm2 .* else than mlp returns",
    ),
    "a sublayer that is not named": (
        TwoParts, (("norm1", "attn"),), "behind norm1 .* else than attn returns",
    ),
    "a part of the last module": (
        TwoParts, (("norm1", "attn.linear"), ("norm2", None)), "else than attn.linear returns",
    ),
    "adds in place": (AddsInPlace, NAMES, "behind norm2 .* is added in place"),
    "norms of two sublayers": (
        TwoParts, ((("norm1", "norm2"), None),), "its norms, which share a read, do not get one t",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_layers_that_do_something_else(fault):
    layer, sublayers, message = FAULTS[fault]
    model = connected(layer, sublayers)
    with pytest.raises(RuntimeError, match=message):
        model(X[:, :2].double())
    # Nothing is left behind.
    deepfast.disconnect(model)
    assert model.blocks[0](X.double()).shape == X.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_misfit(dtype):
    """The sums of a layer in 16 bits, with large inputs."""
    model = connected().to(dtype)
    for scale in (1, 1000):
        model.depth_connection.query.data.zero_()
        assert model(scale * X.to(dtype)).isfinite().all()


@pytest.mark.parametrize(("sublayers", "options", "error", "message"), [
    ("auto", {}, ValueError, "sublayers='auto' knows LlamaDecoderLayer, .*; TwoParts is none"),
    ("all", {}, TypeError, "sublayers must be 'auto' or a pair .*, got 'all'"),
    ((), {}, TypeError, r"sublayers must be 'auto' or a pair .*, got \(\)"),
    (("norm1", "attn"), {}, TypeError, "sublayers must be 'auto' or a pair"),
    ([((), "attn")], {}, TypeError, "sublayers must be 'auto' or a pair"),
    ([(("norm1", 2), "attn")], {}, TypeError, "sublayers must be 'auto' or a pair"),
    ([("norm1", "attn"), ("norm3", "mlp")], {}, ValueError,
     "sublayers: TwoParts has no module 'norm3'; its modules are norm1, attn, norm2, mlp"),
    ([("norm1", "attn"), ("norm2", "attn")], {}, ValueError,
     "a Part is a part of two sublayers"),
    (NAMES, {"connection": "dlcl"}, ValueError, "sublayers needs attention residuals"),
    (NAMES, {"norm": "post"}, ValueError, "needs norm='pre', got 'post'"),
    (None, {"additive": "gated"}, ValueError, "additive='gated' needs sublayers=, got None"),
    (NAMES, {"additive": "two"}, ValueError, "additive must be one of gated, one, got 'two'"),
    (NAMES, {"additive": "one", "recompute": "layer+input"}, ValueError,
     r"expected recompute='none' or 'layer', got 'layer\+input'"),
    (NAMES, {"reads": 2}, ValueError, "reads is given by sublayers="),
])  # fmt: skip
def test_arguments(sublayers, options, error, message):
    with pytest.raises(error, match=message):
        connected(sublayers=sublayers, **options)


def shared(layers):
    layers[1].attn = layers[0].attn
    return layers


def without_norm2(layer):
    del layer.norm2
    return layer


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: [TwoParts(), without_norm2(TwoParts())], "TwoParts has no module 'norm2'"),
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


def drops_behind(m, x):
    """A dropout behind the module that is named."""
    x = x + nn.functional.dropout(m.attn(m.norm1(x)), 0.5, m.training)
    return x + m.mlp(m.norm2(x))


def test_an_evaluation_first_hides_no_dropout():
    model = connected(does(drops_behind), BOTH).eval()
    model(X.double())
    with pytest.raises(RuntimeError, match="adds something else than attn returns"):
        model.train()(X.double())


def test_names_that_no_run_has_checked_are_not_compiled():
    torch._dynamo.reset()
    model = connected(does(drops_behind), BOTH).eval()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="run the model once before"):
        run(X.double())
    wanted = model(X.double())
    torch._dynamo.reset()
    torch.testing.assert_close(run(X.double()), wanted)
