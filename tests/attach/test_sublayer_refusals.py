"""Layers and arguments that reads of sublayers refuse."""

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.layers import NAMES, AddsInPlace, Differences, TwoParts, connected
from tests.attach.models import D, Loop, X


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
        (Swapped, "the sublayer behind norm2 of layer 0 runs out of turn"),
        (Skips, "the sublayer behind norm2 of layer 0 did not run"),
        (Twice, "the sublayer behind norm1 of layer 0 runs twice in"),
        (NormAgain, "behind norm1 of layer 0 adds something else than attn returns"),
        (Scales, r"layer 0 of Loop.blocks changes its input before its first norm"),
        (Factor, "behind norm1 of layer 0 adds something else than attn returns"),
        (IntoTheOutput, "needs None in place of attn, whose output is modified in place"),
        (Transposes, "changes its input before its first norm"),
        (NoAttention, "the sublayer behind norm1 of layer 0 ends before attn has run"),
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
            "its norms, which share a read, do not get one tensor",
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
        (
            [("norm1", "attn"), ("norm2", "attn")],
            {},
            ValueError,
            "a Part is a part of two sublayers",
        ),
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
        (NAMES, {"reads": 2}, ValueError, "reads is given by sublayers="),
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


class DropsBehind(TwoParts):
    """A dropout behind the module that is named."""

    def forward(self, x):
        x = x + nn.functional.dropout(self.attn(self.norm1(x)), 0.5, self.training)
        return x + self.mlp(self.norm2(x))


def test_an_evaluation_first_hides_no_dropout():
    model = connected(DropsBehind, (("norm1", "attn"), ("norm2", "mlp"))).eval()
    model(X.double())
    with pytest.raises(RuntimeError, match="adds something else than attn returns"):
        model.train()(X.double())


def test_names_that_no_run_has_checked_are_not_compiled():
    torch._dynamo.reset()
    names = (("norm1", "attn"), ("norm2", "mlp"))
    model = connected(DropsBehind, names).eval()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="run the model once before"):
        run(X.double())
    wanted = model(X.double())
    torch._dynamo.reset()
    torch.testing.assert_close(run(X.double()), wanted)
