"""torch.compile of layers and stacks: one graph, the same numbers, any number of tokens."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deepfast.depth.depth_pass import DepthPass
from deepfast.nn import (
    DLCL,
    AttentionResiduals,
    DepthHistory,
    Packing,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.nn.written_out import leaf, outcome, shaken

DIM, HEADS, FFN = 16, 2, 24


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(module, backend="aot_eager"):
    """Compiled whole, and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, dynamic=True, backend=counter), counter


def assert_same(got, want):
    """Results at first, then gradients."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-5)


class Stack(torch.nn.Module):
    """Layers without parameters around a connection, which a compiler sees as registered ops."""

    def __init__(self, layers=3, kind=DLCL, **options):
        super().__init__()
        self.depth = shaken(kind(layers, DIM, **options))

    def forward(self, x, dropout_p=0.3):
        history = DepthHistory()
        x = self.depth(x, history)
        for k in range(self.depth.num_layers):
            x = self.depth(torch.tanh(x), history, residual=x, dropout_p=dropout_p, seed=9 + k)
        return x


class Padded(TransformerEncoderLayer):
    """Where there is padding, the layer in eager code packs it away."""

    def forward(self, x):
        length = x.shape[1]
        return super().forward(x, torch.arange(length) >= torch.tensor([[length], [2], [4]]))


def layer(kind, **options):
    return lambda: kind(DIM, HEADS, FFN, dropout=0.0, **options)


MODULES = {
    "padded encoder layer": layer(Padded, num_kv_heads=1, window=(1, 2)),
    "post-norm decoder layer": layer(TransformerDecoderLayer, norm="post"),
    "vector": lambda: Stack(norm=None, weight_type="vector", softmax=True, window=2),
    "group": lambda: Stack(norm="post", weight_type="group", groups=4),
    "attention residuals": lambda: Stack(kind=AttentionResiduals),
}
MORE = {
    "post-norm encoder layer": layer(TransformerEncoderLayer, norm="post"),
    "decoder layer": layer(TransformerDecoderLayer),
    "encoder": lambda: TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.0),
    "rms encoder": lambda: TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.0, norm_type="rms"),
    "post-norm encoder": lambda: TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.0, norm="post"),
    "dlcl": Stack,
    "attention residuals in blocks": lambda: Stack(kind=AttentionResiduals, block=2),
    "relu": lambda: Stack(kind=AttentionResiduals, score_function="relu"),
    "rms": lambda: Stack(norm_type="rms"),
    "vector alone": lambda: Stack(norm=None, weight_type="vector"),
    "softmax": lambda: Stack(softmax=True, window=2),
    "period": lambda: Stack(period=2, normalize_embedding=True),
    "rms post": lambda: Stack(norm="post", norm_type="rms"),
    "fixed": lambda: Stack(norm="post", learnable=False, normalize_embedding=True),
}


@pytest.mark.parametrize(
    "name", [*MODULES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)]
)
def test_a_module_is_one_graph(name):
    module, frames = (MODULES | MORE)[name](), []
    alone = isinstance(module, Stack)
    run, counter = compiled(module)
    # No number of tokens is another size of the model: the compiler makes a guard of equal sizes.
    for length in (5,) if alone else (5, 9):
        x, encoded = leaf(3, length, DIM), [leaf(3, 7, DIM)]
        others = encoded if isinstance(module, TransformerDecoderLayer) else []
        # Eager code first: it keeps masks for later calls, and the compiler guards what is kept.
        want = outcome(module, x, module, *others)
        assert_same(outcome(run, x, module, *others), want)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1] > 0


def test_layers_with_dropout_draw_their_own_masks():
    """A compiled layer in training: masks differ from step to step, the seed sets them back."""
    run, _ = compiled(TransformerEncoderLayer(DIM, HEADS, FFN, dropout=0.5), "eager")
    x, packing = torch.randn(8, DIM), Packing(2, 4)

    def step(seed):
        torch.manual_seed(seed)
        return run(x, normed=x, packing=packing)[0]

    assert torch.equal(step(1), step(1))
    assert not torch.equal(step(1), step(2))


def test_a_whole_stack_under_autocast():
    """States are in fp32, as in eager code."""
    stack, x = Stack(2), leaf(5, DIM)

    def run(x):
        return stack(x @ torch.eye(DIM), 0.0)

    with torch.autocast("cpu", torch.bfloat16):
        got, want = (outcome(each, x, stack) for each in (compiled(run, "eager")[0], run))
    assert got[0].dtype == torch.float32
    assert_same(got, want)


STACKS = [
    ("layers", {"connection": "attnres", "recompute": "ffn"}),
    ("stack", {"recompute": "layer"}),
]
CONNECTIONS = ("dlcl", "attnres", "block_attnres", "residual")
MORE_STACKS = [
    *(("layers", {"connection": name}) for name in CONNECTIONS),
    ("layers", {"norm": "post"}),
    *(("layers", {"recompute": name, "dropout": 0.1}) for name in ("ffn", "layer+input")),
    *(("layers", {"recompute": name}) for name in ("ffn", "layer", "layer+input")),
    *(("stack", {"recompute": name}) for name in ("ffn", "layer+input")),
]
STACKS += [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_STACKS]


@pytest.mark.parametrize(("what", "options"), STACKS, ids=str)
def test_stacks_under_memory_policies(what, options):
    """Each layer compiled by itself, the boundaries eager: the engine runs as ever. Or the whole
    stack. Layers share their code and its guards, so that one compilation serves all of them."""
    options = {"dropout": 0.0} | options
    module, plain = (
        TransformerEncoder(2, DIM, HEADS, FFN, **options | recompute)
        for recompute in ({}, {"recompute": "none"})
    )
    plain.load_state_dict(module.state_dict())
    counter, frames = CompileCounterWithBackend("aot_eager"), []
    for part in module.layers if what == "layers" else [module]:
        part.compile(fullgraph=True, dynamic=what == "layers", backend=counter)
    for length in (5, 8) if what == "layers" else (5, 5):
        x = leaf(3, length, DIM)
        got, want = (outcome(m, x, m) for m in (module, plain))
        # Masks of dropout differ.
        if not options["dropout"]:
            assert what == "stack" or torch.equal(got[0], want[0])
            assert_same(got, want)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] > 0


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


class Pushing(torch.nn.Module):
    """A stack without a loop of its own for depth: hooks of the layers push, or layers do."""

    def __init__(self, kind, layers, by):
        super().__init__()
        self.connection, self.by = kind(layers, DIM), by
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(DIM, DIM, bias=False) for _ in range(layers)
        )
        self.history = None
        if by == "layers":
            for layer in self.layers:
                layer.forward = lambda x, layer=layer: self.push(layer.weight @ x.mT)
            return
        if by == "first layer":
            self.layers[0].register_forward_pre_hook(lambda _, args: self.begin(*args))
        for k, layer in enumerate(self.layers, 1):
            layer.register_forward_hook(lambda _, args, y, k=k: self.push(y.mT, index=k))

    def begin(self, x):
        self.history = DepthHistory(eager=True if self.by == "first layer" else None)
        return self.connection(x, self.history)

    def push(self, y_DT, **options):
        return self.connection(torch.tanh(y_DT.mT), self.history, **options)

    def forward(self, x):
        x = x if self.by == "first layer" else self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [DLCL, AttentionResiduals])
@pytest.mark.parametrize("by", ["hooks", "layers", "first layer"])
def test_layers_compiled_one_by_one_may_push(kind, by):
    """A push breaks the graph: the number of graphs and their size do not grow with depth."""
    frames = []
    for layers in (2, 4):
        torch._dynamo.reset()
        stack, x = Pushing(kind, layers, by), leaf(5, DIM)
        want = outcome(stack, x, stack)
        counter = CompileCounterWithBackend("aot_eager")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for layer in stack.layers:
                layer.compile(backend=counter)
            got = outcome(stack, x, stack)
        assert isinstance(stack.history.depth_pass, DepthPass)
        assert_same(got, want)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] > 0


def test_a_full_graph_cannot_push_into_a_history_from_outside():
    dlcl, history = DLCL(3, DIM), DepthHistory()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"DepthHistory\(eager=False\)"):
        compiled(lambda x: dlcl(x, history))[0](torch.randn(3, DIM))


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((None, 0), "out of order inside"),
        ((None, 2), "out of order inside"),
        ((None,) * 5, "has all of its 4 states"),
    ],
)
def test_traced_pushes_that_are_refused(indices, words):
    dlcl = DLCL(3, DIM)

    def run(x):
        history = DepthHistory()
        for index in indices:
            x = dlcl(x, history, index=index)
        return x

    with pytest.raises(Exception, match=words):
        compiled(run)[0](torch.randn(3, DIM))
