"""torch.compile of layers and stacks: one graph, the same numbers, any number of tokens."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deepfast.depth.state import DepthState
from deepfast.nn import (
    DLCL,
    AttentionResiduals,
    DepthHistory,
    Packing,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

DIM, HEADS, FFN = 16, 2, 24


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(module, **options):
    """Compiled whole, and the counter of its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(
        module, fullgraph=True, dynamic=True, backend=counter, **options
    ), counter  # fmt: skip


def gradients(module, loss, *inputs):
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    return torch.autograd.grad(loss, leaves)


def compare(module, run, plain, *inputs):
    a, b = run(*inputs), plain(*inputs)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for g, h in zip(
        gradients(module, a.square().sum(), *inputs),
        gradients(module, b.square().sum(), *inputs),
        strict=True,
    ):
        torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norm", "mask"), [("pre", True), ("post", False)])
def test_an_encoder_layer_is_one_graph(norm, mask):
    layer = TransformerEncoderLayer(DIM, HEADS, FFN, norm=norm, dropout=0.0)
    run, counter = compiled(layer)
    for length in (5, 8):
        x = torch.randn(3, length, DIM, requires_grad=True)
        padding = None
        if mask:
            padding = torch.arange(length) >= torch.tensor([[length], [2], [4]])
        # Where there is padding the plain layer packs it away.
        compare(layer, lambda x, m=padding: run(x, m), lambda x, m=padding: layer(x, m), x)
        if length == 5:
            first = counter.frame_count
    assert counter.frame_count == first > 0


def test_a_decoder_layer_is_one_graph():
    layer = TransformerDecoderLayer(DIM, HEADS, FFN, dropout=0.0)
    run, _ = compiled(layer)
    x = torch.randn(3, 5, DIM, requires_grad=True)
    memory = torch.randn(3, 7, DIM, requires_grad=True)
    compare(layer, run, layer, x, memory)


# A residual stack compiles the same layers as a DLCL stack with its norm: one of them is enough.
@pytest.mark.parametrize(
    ("norm", "connection"),
    [
        ("pre", "dlcl"),
        ("pre", "attnres"),
        pytest.param("pre", "block_attnres", marks=pytest.mark.exhaustive),
        pytest.param("pre", "residual", marks=pytest.mark.exhaustive),
        pytest.param("post", "dlcl", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_around_a_live_history(norm, connection):
    """Each layer compiled by itself, the boundaries eager: the engine runs as ever."""
    options = {"norm": norm, "connection": connection, "dropout": 0.0}
    encoder, plain = (TransformerEncoder(5, DIM, HEADS, FFN, **options) for _ in range(2))
    plain.load_state_dict(encoder.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    for layer in encoder.layers:
        layer.compile(fullgraph=True, dynamic=True, backend=counter)
    for tokens in (4, 7):
        x = torch.randn(2, tokens, DIM, requires_grad=True)
        outputs = encoder(x), plain(x)
        assert torch.equal(*outputs)
        grads = (
            gradients(m, o.square().sum(), x)
            for m, o in zip((encoder, plain), outputs, strict=True)
        )
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        if tokens == 4:
            first = counter.frame_count
    # The layers share their code and its guards: they are not compiled one by one.
    assert counter.frame_count == first > 0


def test_layers_with_dropout_draw_their_own_masks():
    """A compiled layer in training: masks differ from step to step, the seed sets them back."""
    layer = TransformerEncoderLayer(DIM, HEADS, FFN, dropout=0.5)
    run, _ = compiled(layer)
    x, packing = torch.randn(2, 4, DIM), Packing(2, 4)

    def step(seed):
        torch.manual_seed(seed)
        return run(x.view(8, DIM), normed=x.view(8, DIM), packing=packing)[0]

    assert torch.equal(step(1), step(1))
    assert not torch.equal(step(1), step(2))


KINDS = [
    {"norm": None, "weight": "vector", "softmax": True, "window": 2},
    {"norm": "post", "weight": "group", "groups": 3},
    *(
        pytest.param(options, marks=pytest.mark.exhaustive)
        for options in (
            {},
            {"norm_kind": "rms"},
            {"norm": None, "weight": "vector"},
            {"softmax": True, "window": 2},
            {"period": 2, "normalize_embedding": True},
            {"norm": "post", "norm_kind": "rms"},
            {"norm": "post", "learnable": False, "normalize_embedding": True},
        )
    ),
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_whole_stack_traces_to_one_graph(options):
    """Under a compiler DLCL is a functional form over registered ops."""
    layers, seed = 3, 9
    dlcl = DLCL(layers, DIM, **options)
    for p in dlcl.parameters():
        p.data += 0.1 * torch.randn_like(p)

    def run(x):
        history = DepthHistory()
        x = dlcl(x, history)
        for k in range(layers):
            x = dlcl(torch.tanh(x), history, residual=x, dropout_p=0.3, seed=seed + k)
        return x

    traced, _ = compiled(run)
    compare(dlcl, traced, run, torch.randn(5, DIM, requires_grad=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"norm_kind": "rms"}, {"norm": "post"}], ids=str)
def test_a_whole_encoder_traces_to_one_graph(options):
    encoder = TransformerEncoder(1, DIM, HEADS, FFN, dropout=0.0, **options)
    run, counter = compiled(encoder)
    for length in (4, 6):
        compare(encoder, run, encoder, torch.randn(2, length, DIM, requires_grad=True))
    assert counter.frame_count > 0


def test_a_whole_stack_under_autocast():
    """States are in fp32, as in eager code."""
    dlcl = DLCL(2, DIM)

    def run(x):
        history = DepthHistory()
        x = dlcl(x, history)
        for _ in range(2):
            x = dlcl(x @ torch.eye(DIM), history, residual=x)
        return x

    x = torch.randn(5, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.float32
        compare(dlcl, compiled(run)[0], run, x)


def test_too_many_pushes_into_a_traced_history():
    dlcl = DLCL(1, DIM)

    def run(x):
        history = DepthHistory()
        for _ in range(3):
            x = dlcl(x, history)
        return x

    with pytest.raises(Exception, match="has all of its 2 states"):
        compiled(run)[0](torch.randn(3, DIM))


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
    for layers in (3, 6):
        torch._dynamo.reset()
        stack = Pushing(kind, layers, by)
        x = torch.randn(5, DIM, requires_grad=True)
        expected = stack(x)
        want = gradients(stack, expected.square().sum(), x)
        counter = CompileCounterWithBackend("aot_eager")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for layer in stack.layers:
                layer.compile(backend=counter)
            got = stack(x)
        assert isinstance(stack.history.state, DepthState)
        torch.testing.assert_close(got, expected)
        for a, b in zip(gradients(stack, got.square().sum(), x), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] > 0


def test_a_full_graph_cannot_push_into_a_history_from_outside():
    dlcl, history = DLCL(3, DIM), DepthHistory()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"DepthHistory\(eager=False\)"):
        compiled(lambda x: dlcl(x, history))[0](torch.randn(3, DIM))


@pytest.mark.parametrize("index", [0, 2])
def test_a_traced_push_out_of_order(index):
    dlcl = DLCL(3, DIM)

    def run(x):
        history = DepthHistory()
        return dlcl(dlcl(x, history), history, index=index)

    with pytest.raises(Exception, match="out of order inside"):
        compiled(run)[0](torch.randn(3, DIM))


@pytest.mark.each_value
@pytest.mark.parametrize("memory", ["lean", "leaner", "states", "history"])
@pytest.mark.parametrize(("what", "dropout"), [("layers", 0.0), ("stack", 0.0), ("layers", 0.1)])
def test_memory_policies_of_compiled_layers_and_stacks(memory, what, dropout):
    plain, module = (TransformerEncoder(2, DIM, HEADS, FFN, dropout=dropout, memory=m)
                     for m in ("keep", memory))  # fmt: skip
    module.load_state_dict(plain.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    for part in module.layers if what == "layers" else [module]:
        part.compile(fullgraph=True, dynamic=False, backend=counter)
    x, frames = torch.randn(3, 5, DIM, requires_grad=True), []
    for _ in range(3):
        plain.zero_grad()
        module.zero_grad()
        for each in (plain, module):
            each(x).square().sum().backward()
        if dropout:
            # Their masks differ.
            frames.append(counter.frame_count)
            continue
        for (name, p), q in zip(plain.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        frames.append(counter.frame_count)
    assert frames[0] > 0
    assert len(set(frames)) == 1
