"""Whole stacks on a GPU: DLCL against the reference, CUDA graphs, compilation, no waiting."""

import copy

import pytest
import torch

from deepfast import ops
from deepfast.nn import (
    DLCL,
    DepthHistory,
    LayerNorm,
    Packing,
    TransformerEncoder,
    TransformerEncoderLayer,
)

pytestmark = pytest.mark.gpu

REAL = torch.cuda.is_available()
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16
LAYERS, T, D = (30, 1000, 512) if REAL else (4, 3, 16)
SENTENCES, LENGTH, HEADS = (64, 32, 8) if REAL else (2, 3, 2)


def differentiate(dlcl, x, scales, p, backend):
    """A stack of simple layers: output, and the gradients of input and parameters."""
    dlcl.backend = backend
    history, out_norm = DepthHistory(), None
    norm = LayerNorm(dlcl.dim, backend=backend).to(x)
    residual, branch = x, torch.zeros_like(x)
    for k, scale in enumerate(scales):
        out_norm = norm.as_output() if dlcl.norm == "pre" else None
        out = dlcl(branch, history, residual=residual, dropout_p=p, seed=100 + k, out_norm=out_norm)
        residual, n = out if out_norm is not None else (out, out)
        branch = torch.tanh(n * scale.to(n.dtype))
    y = dlcl(branch, history, residual=residual, dropout_p=p, seed=99)
    leaves = {"x": x, **dict(dlcl.named_parameters())}
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), grad)
    return {"y": y.detach().cpu()} | {k: g.cpu() for k, g in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"weight_type": "vector", "window": 7}],
                         ids=str)  # fmt: skip
def test_dlcl_of_30_layers(by, tolerances, device, options, dtype):
    dlcl = DLCL(LAYERS, D, **options)
    with torch.no_grad():
        for parameter in dlcl.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    x, scales = torch.randn(T, D).to(dtype), torch.rand(LAYERS, D)

    def run(backend, dtype, where):
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        there = DLCL(LAYERS, D, **options).to(where, compute)
        there.load_state_dict(dlcl.state_dict())
        given = x.to(where, dtype).requires_grad_()
        return differentiate(there, given, scales.to(where, compute), 0.1, backend)

    got = run(by, dtype, device)
    plain = run("reference", dtype, device)
    exact = run("reference", torch.float64, "cpu")
    tolerances.assert_all_accurate(got, plain, exact, dtype)


def make_ops(by, device, p):
    """Forward and backward of each op as a function of one static input."""
    x = torch.randn(T, D, device=device).to(HALF).requires_grad_()
    w, b = (torch.randn(D, device=device, requires_grad=True) for _ in range(2))
    weight = torch.rand(3, device=device, requires_grad=True)
    cu = torch.tensor([0, 2, T], dtype=torch.int32, device=device)

    def layer_norm():
        y, _ = ops.add_layer_norm(x, x, w, b, dropout_p=p, training=True, backend=by)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    def depth_mix():
        y = ops.depth_mix([x, 2 * x, -x], weight, backend=by)
        return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    def attention():
        q = x.view(T, HEADS, -1)
        o = ops.attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=T, max_seqlen_k=T,
            dropout_p=p, backend="triton",
        )  # fmt: skip
        return o, *torch.autograd.grad(o, x, torch.ones_like(o))

    layers = LAYERS if REAL else 1
    dlcl = DLCL(layers, D, backend=by).to(device)

    def stack():
        history, y = DepthHistory(), x
        for _ in range(layers + 1):
            y = dlcl(y, history, dropout_p=p)
        return y, *torch.autograd.grad(y, (x, dlcl.weight), torch.ones_like(y))

    def stack_forward():
        with torch.no_grad():
            history, y = DepthHistory(), x
            for _ in range(layers + 1):
                y = dlcl(y, history, dropout_p=p)
        return (y,)

    return x, {f.__name__: f for f in (layer_norm, depth_mix, attention, stack, stack_forward)}


NAMES = ["layer_norm", "depth_mix", "attention", "stack", "stack_forward"]


def copy_in(x, value):
    with torch.no_grad():
        x.copy_(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_replays(by, device, capture, name):
    x, functions = make_ops(by, device, 0.0)
    replay, results = capture(lambda: [t.detach() for t in functions[name]()])
    for _ in range(2):
        copy_in(x, torch.randn_like(x))
        replay()
        got = [r.clone() for r in results]
        for a, b in zip(got, functions[name](), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["layer_norm", "attention", "stack", "stack_forward"])
def test_replays_draw_fresh_dropout_masks(by, device, capture, name):
    """The seed is drawn inside the graph, on the device."""
    _, functions = make_ops(by, device, 0.5)
    replay, results = capture(lambda: [t.detach() for t in functions[name]()])
    seen = []
    for _ in range(3):
        replay()
        seen.append(results[0].clone())
        assert torch.isfinite(results[0]).all()
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def encoder(by, device, dropout):
    stack = TransformerEncoder(2 if REAL else 1, D, HEADS, 2 * D, dropout=dropout, backend=by)
    return stack.to(device)


def packing_of(device, padded):
    if not padded:
        return Packing.of(SENTENCES, LENGTH, None)
    lengths = torch.randint(1, LENGTH + 1, (SENTENCES, 1), device=device)
    lengths[0] = LENGTH
    return Packing.of(SENTENCES, LENGTH, torch.arange(LENGTH, device=device) >= lengths)


@pytest.mark.parametrize("padded", [True, False])
def test_a_cuda_graph_of_an_encoder(by, device, capture, padded):
    stack, packing = encoder(by, device, 0.0), packing_of(device, padded)
    x = packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device))

    def forward():
        with torch.no_grad(), torch.autocast(device, HALF):
            return [stack.forward_packed(x, packing)]

    replay, results = capture(forward)
    copy_in(x, torch.randn_like(x))
    replay()
    assert torch.equal(results[0], forward()[0])


def test_a_cuda_graph_of_a_training_step(by, device, capture):
    """Its replays train as steps without a graph do, to the bit."""
    packing, count = packing_of(device, padded=True), 3
    batches = [packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device)) for _ in range(count)]
    x, stack = batches[0].clone(), encoder(by, device, 0.0)
    start = copy.deepcopy(stack.state_dict())

    def trainer(stack):
        optimizer = torch.optim.AdamW(stack.parameters(), capturable=REAL)

        def step():
            with torch.autocast(device, HALF):
                loss = stack.forward_packed(x, packing).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return [loss.detach()]

        return optimizer, step

    def losses(step, result):
        found = []
        for batch in batches:
            copy_in(x, batch)
            step()
            found.append(result().clone())
        return found

    optimizer, step = trainer(stack)
    replay, results = capture(step)
    # The steps before the capture, and the capture's own buffers, leave nothing behind.
    stack.load_state_dict(start)
    for moments in optimizer.state.values():
        for value in moments.values():
            value.zero_()
    got = losses(replay, lambda: results[0])
    eager = encoder(by, device, 0.0)
    eager.load_state_dict(start)
    _, step = trainer(eager)
    kept = []
    expected = losses(lambda: kept.append(step()[0]), lambda: kept[-1])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for (name, p), q in zip(stack.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("name", NAMES)
def test_ops_do_not_synchronise(by, device, unsynchronised, name):
    _, functions = make_ops(by, device, 0.1)
    functions[name]()
    with unsynchronised():
        functions[name]()


@pytest.mark.parametrize("padded", [True, False])
def test_an_encoder_does_not_synchronise(by, device, unsynchronised, padded):
    stack, packing = encoder(by, device, 0.1), packing_of(device, padded)
    x = packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device))

    def step():
        with torch.autocast(device, HALF):
            y = stack.forward_packed(x, packing)
        y.float().square().mean().backward()

    step()
    with unsynchronised():
        step()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_compiled_layer_is_one_graph(by, tolerances, device, norm):
    layer = TransformerEncoderLayer(D, HEADS, 2 * D, norm=norm, dropout=0.0, backend=by)
    layer.to(device)
    x = torch.randn(SENTENCES, LENGTH, D, device=device, requires_grad=True)
    code = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=code)

    def run(forward, x):
        y = forward(x)
        leaves = [x, *layer.parameters()]
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return {str(i): t.detach().cpu() for i, t in enumerate((y, *grads))}

    got, plain = run(compiled, x), run(layer, x)
    layer.cpu().double()
    for module in layer.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    exact = run(layer, x.detach().cpu().double().requires_grad_())
    tolerances.assert_all_accurate(got, plain, exact, torch.float32)
