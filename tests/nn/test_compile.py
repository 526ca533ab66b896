"""torch.compile of passes, layers and stacks: one graph, the numbers of eager code, any length."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from deepfast.depth.depth_pass import DepthPass
from deepfast.nn import (
    DLCL,
    AttentionResiduals,
    DepthHistory,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.nn.written_out import leaf, outcome, shaken

DIM, HEADS, FFN = 16, 2, 24


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def assert_same(got, want):
    """Results at first, then gradients."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-5)


# ---- passes of a connection ----------------------------------------------------------------------


class Stack(nn.Module):
    """Layers around a connection in float64, and the ways of its passes. p: of dropout."""

    def __init__(self, kind=DLCL, layers=4, p=0.3, **options):
        super().__init__()
        self.p = p
        self.connection = shaken(kind(layers, DIM, **options)).double()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers)).double()

    def one(self, x, upto=None):
        history = DepthHistory(block=3)
        x = self.connection(x, history)
        for k, layer in enumerate(self.layers[:upto]):
            y = torch.tanh(layer(x))
            x = self.connection(y, history, residual=x, dropout_p=self.p, seed=9 + k)
        return x

    forward = one

    def early(self, x):
        """The rows above have no gradient."""
        return self.one(x, upto=3)

    def twice(self, x):
        """A pass over the result of another."""
        return self.one(torch.sin(self.one(x)))

    def side_by_side(self, x):
        """Two passes take turns."""
        states, histories = [x, x.cos()], [DepthHistory(), DepthHistory()]
        for layer in [nn.Identity(), *self.layers]:
            each = zip(states, histories, strict=True)
            states = [self.connection(torch.tanh(layer(s)), h) for s, h in each]
        return states[0] + 2 * states[1]

    def unread(self, x):
        """A layer that reads nothing of its row."""
        history = DepthHistory()
        self.connection(x, history)
        for layer in self.layers:
            x = self.connection(torch.tanh(layer(x.detach())), history)
        return x

    def checkpointed(self, x):
        """The pass runs again in backward."""
        return checkpoint(self.one, x, use_reentrant=False)

    def no_grad(self, x):
        with torch.no_grad():
            y = self.one(x)
        return y + x

    def autocast(self, x):
        """States are in fp32, as in eager code."""
        with torch.autocast("cpu", torch.bfloat16):
            y = self.one(x @ torch.eye(DIM))
        assert y.dtype == torch.float32
        return y


RESIDUALS = AttentionResiduals
# The options take turns over the ways.
PASSES = [
    ("one", RESIDUALS, {}),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("one", DLCL, {"norm": None, "weight_type": "vector", "softmax": True, "window": 2}),
        ("early", DLCL, {"norm": "post", "weight_type": "group", "groups": 4}),
        ("early", RESIDUALS, {"score_function": "relu"}),
        ("twice", DLCL, {"norm_type": "rms"}),
        ("twice", RESIDUALS, {"block": 2}),
        ("side_by_side", RESIDUALS, {}),
        ("unread", DLCL, {"period": 2, "normalize_embedding": True}),
        ("unread", RESIDUALS, {}),
        ("checkpointed", DLCL, {"norm": "post", "norm_type": "rms"}),
        ("checkpointed", RESIDUALS, {}),
        ("no_grad", DLCL, {"norm": "post", "learnable": False, "normalize_embedding": True}),
        ("autocast", DLCL, {}),
        ("autocast", RESIDUALS, {}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("way", "kind", "options"), PASSES)
def test_a_pass_in_one_graph(way, kind, options):
    stack = Stack(kind, **options)
    stack = stack.float() if way == "autocast" else stack
    run, x = getattr(stack, way), torch.randn(3, 5, DIM, dtype=stack.layers[0].weight.dtype)
    x.requires_grad_()
    # A graph may give zeros where nothing is read.
    unread = {"allow_unused": True, "materialize_grads": True}
    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, wanted = (outcome(each, x, stack, **unread) for each in (graph, run))
    # In fp32 the boundaries round, and the compiler may order other sums.
    tolerance = 1e-4 if way == "autocast" else 1e-11
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_graphs_of_one_code():
    """A retained graph runs backward again; a copy of a connection has its own graph."""
    stack, x = Stack(RESIDUALS, p=0.0), torch.randn(5, DIM).double().requires_grad_()
    out = torch.compile(stack, fullgraph=True, backend="aot_eager")(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out, x)[0])
    for each in (stack, shaken(copy.deepcopy(stack))):
        run = torch.compile(each.one, fullgraph=True, dynamic=True, backend="eager")
        torch.testing.assert_close(run(x), each(x), rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in the loop", "behind"])
def test_a_graph_that_breaks_has_the_gradients_of_eager_code(place):
    """Then the pass goes by registered ops through several graphs."""
    stack, x = Stack(RESIDUALS, layers=4), torch.randn(4, DIM).double().requires_grad_()
    if place == "in the loop":
        stack.layers[2].register_forward_hook(lambda *_: torch._dynamo.graph_break())

    def run(x):
        y = stack(x)
        torch._dynamo.graph_break()
        return y * 2

    got = outcome(torch.compile(run, backend="aot_eager"), x, stack)
    torch.testing.assert_close(got, outcome(run, x, stack), rtol=1e-11, atol=1e-11)


# ---- layers and stacks ---------------------------------------------------------------------------


class Padded(TransformerEncoderLayer):
    """Where there is padding, the layer in eager code packs it away."""

    def forward(self, x):
        length = x.shape[1]
        return super().forward(x, torch.arange(length) >= torch.tensor([[length], [2], [4]]))


ENCODER, DECODER_LAYER = TransformerEncoder, TransformerDecoderLayer
MODULES = [
    (Padded, {"num_kv_heads": 1, "window": (1, 2)}, "whole"),
    (DECODER_LAYER, {"norm": "post"}, "whole"),
    (ENCODER, {}, "whole"),
    (ENCODER, {"connection": "attnres"}, "whole"),
    (ENCODER, {"norm_type": "rms", "recompute": "ffn"}, "whole"),
    (ENCODER, {"norm": "post", "recompute": "layer+input"}, "whole"),
    (ENCODER, {"connection": "attnres", "recompute": "ffn"}, "layers"),
    (ENCODER, {"connection": "residual", "norm": "post", "recompute": "layer"}, "layers"),
    (ENCODER, {"connection": "block_attnres"}, "layers"),
    (ENCODER, {"recompute": "layer+input", "dropout": 0.1}, "layers"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "what"), MODULES, ids=str)
def test_a_module_is_one_graph(kind, options, what):
    """A layer, a whole stack, or each layer by itself: then the boundaries are eager, the engine
    runs as ever, and layers share their code and its guards, so that one compilation serves all."""
    sizes = (*((2,) if kind is ENCODER else ()), DIM, HEADS, FFN)
    module, plain = (
        kind(*sizes, **{"dropout": 0.0} | options | own) for own in ({}, {"recompute": "none"})
    )
    plain.load_state_dict(module.state_dict())
    dynamic = what == "layers" or "recompute" not in options
    counter, frames = CompileCounterWithBackend("aot_eager"), []
    for part in module.layers if what == "layers" else [module]:
        part.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    # No number of tokens is another size of the model: the compiler makes a guard of equal sizes.
    for length in (5, 9) if dynamic else (5, 5):
        x, encoded = leaf(3, length, DIM), [leaf(3, 7, DIM)]
        others = encoded if kind is DECODER_LAYER else []
        # Eager code first: it keeps masks for later calls, and the compiler guards what is kept.
        want, got = (outcome(m, x, m, *others) for m in (plain, module))
        # Masks of dropout differ.
        if "dropout" not in options:
            assert what != "layers" or torch.equal(got[0], want[0])
            assert_same(got, want)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] > 0


@pytest.mark.slow
def test_dropout_in_a_graph():
    """Masks differ from step to step, the seed sets them back."""
    layer = TransformerEncoderLayer(DIM, HEADS, FFN, dropout=0.5)
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    x = torch.randn(2, 4, DIM)

    def step(seed):
        torch.manual_seed(seed)
        return run(x)

    assert torch.equal(step(1), step(1))
    assert not torch.equal(step(1), step(2))


# ---- pushes from inside compiled code ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DLCL, RESIDUALS])
def test_layers_compiled_one_by_one_may_push(kind):
    """A push breaks the graph: the number of graphs does not grow with depth."""
    counter, frames = CompileCounterWithBackend("aot_eager"), []

    def layer(connection, x, history):
        return torch.tanh(connection(torch.sin(x), history))

    def run(connection, x, each):
        # The first push of a pass is inside compiled code too.
        history = DepthHistory(eager=True)
        for _ in range(connection.rows):
            x = each(connection, x, history)
        assert isinstance(history.depth_pass, DepthPass)
        return [x, *torch.autograd.grad(x.square().sum(), [*connection.parameters()])]

    compiled = torch.compile(layer, backend=counter)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for layers in (2, 4):
            connection, x = shaken(kind(layers, DIM)), leaf(5, DIM)
            assert_same(run(connection, x, compiled), run(connection, x, layer))
            frames.append(counter.frame_count)
            torch._dynamo.reset()
    assert 2 * frames[0] == frames[1] > 0


def test_a_pass_half_traced_is_an_error():
    """Traced and eager passes keep their states in different places."""
    dlcl, x = DLCL(3, DIM), torch.randn(4, DIM)
    push = torch.compile(lambda y, h: dlcl(y, h), backend="eager")
    h = DepthHistory(eager=False)
    push(x, h)
    with pytest.raises(RuntimeError, match="began inside torch"):
        dlcl(x, h)
    # The other way round the push falls back to eager code, and is right.
    h, g = DepthHistory(eager=False), DepthHistory()
    torch.testing.assert_close(push(dlcl(x, h), h), dlcl(dlcl(x, g), g))
    h = DepthHistory()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"DepthHistory\(eager=False\)"):
        torch.compile(lambda x: dlcl(x, h), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize(
    ("indices", "words"), [([None, 2], "out of order inside"), ([None] * 5, "all of its 4 states")]
)
def test_traced_pushes_that_are_refused(indices, words):
    dlcl = DLCL(3, DIM)

    def run(x):
        history = DepthHistory()
        for index in indices:
            x = dlcl(x, history, index=index)

    with pytest.raises(Exception, match=words):
        torch.compile(run, fullgraph=True, backend="eager")(torch.randn(3, DIM))
