"""Ops and whole stacks on a GPU: CUDA graphs, compilation, and no waiting."""

import copy

import pytest
import torch

from deepfast.availability import IN_CUDA
from deepfast.cases.case import tuple_of
from deepfast.cases.sizes import KERNELS, typical, widths
from deepfast.nn import (
    DLCL,
    DepthHistory,
    Packing,
    TransformerEncoder,
    TransformerEncoderLayer,
)

REAL = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, *[pytest.mark.slow] * (not REAL)]
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16
LAYERS, D = (30, 512) if REAL else (1, 16)
SENTENCES, LENGTH, HEADS = (64, 32, 8) if REAL else (2, 3, 2)


def encoder(by, device, dropout):
    stack = TransformerEncoder(2 if REAL else 1, D, HEADS, 2 * D, dropout=dropout, backend=by)
    return stack.to(device)


def packing_of(device, padded=True):
    if not padded:
        return Packing.of(SENTENCES, LENGTH, None)
    lengths = torch.randint(1, LENGTH + 1, (SENTENCES, 1), device=device)
    lengths[0] = LENGTH
    return Packing.of(SENTENCES, LENGTH, torch.arange(LENGTH, device=device) >= lengths)


def make(name, by, device, p):
    """A static input, and forward and backward of an op or a stack as a function of it."""
    if name in KERNELS:
        case = typical(name, widths(name, device)[0], device)
        leaves, by = case.leaves(HALF, HALF, device), by if name in IN_CUDA else "triton"
        return next(iter(leaves.values())), lambda: gradients(
            case.run(**leaves, backend=by), leaves
        )
    packing = packing_of(device, padded=name == "encoder, padded")
    x = packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device)).to(HALF).requires_grad_()
    dlcl, model = DLCL(LAYERS, D, backend=by).to(device), encoder(by, device, p)

    def stack():
        history, y = DepthHistory(), x
        for _ in range(LAYERS + 1):
            y = dlcl(y, history, dropout_p=p)
        return y

    def run():
        if name == "stack, forward":
            with torch.no_grad():
                return [stack()]
        if name == "stack":
            return gradients(stack(), {"x": x, "weight": dlcl.weight})
        with torch.autocast(device, HALF):
            y = model.forward_packed(x, packing)
        return gradients(y, {"x": x} | dict(model.named_parameters()))

    return x, run


def gradients(results, leaves):
    """The results, and the gradients of their sum."""
    results = tuple_of(results)
    grads = torch.autograd.grad(results, list(leaves.values()), list(map(torch.ones_like, results)))
    return [*(y.detach() for y in results), *grads]


STACKS = ["stack", "stack, forward", "encoder", "encoder, padded"] if REAL else ["encoder, padded"]
OPS = [*KERNELS] if REAL else ["depth_mix"]


def copy_in(x, value):
    with torch.no_grad():
        x.copy_(value)


@pytest.mark.parametrize("name", [*OPS, *STACKS])
def test_a_cuda_graph_replays(by, device, capture, name):
    x, run = make(name, by, device, 0.0)
    replay, results = capture(run)
    for _ in range(2):
        copy_in(x, torch.randn_like(x))
        replay()
        got = [r.clone() for r in results]
        assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))


@pytest.mark.parametrize("name", STACKS)
def test_replays_draw_fresh_dropout_masks(by, device, capture, name):
    """The seed is drawn inside the graph, on the device."""
    _, run = make(name, by, device, 0.5)
    replay, results = capture(run)
    seen = []
    for _ in range(3):
        replay()
        seen.append(results[0].clone())
        assert torch.isfinite(results[0]).all()
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("name", [*OPS, *STACKS])
def test_the_host_does_not_wait(by, device, unsynchronised, name):
    _, run = make(name, by, device, 0.1)
    run()
    with unsynchronised():
        run()


def test_a_cuda_graph_of_a_training_step(by, device, capture):
    """Its replays train as steps without a graph do, to the bit."""
    packing = packing_of(device)
    batches = [packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device)) for _ in range(3)]
    x, stack, eager = batches[0].clone(), encoder(by, device, 0.0), encoder(by, device, 0.0)
    start = copy.deepcopy(eager.state_dict())

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

    optimizer, step = trainer(stack)
    replay, (loss,) = capture(step)
    # The steps before the capture, and the capture's own buffers, leave nothing behind.
    stack.load_state_dict(start)
    for moments in optimizer.state.values():
        for value in moments.values():
            value.zero_()
    _, step = trainer(eager)
    got, expected = [], []
    for batch in batches:
        copy_in(x, batch)
        replay()
        got.append(loss.clone())
        expected += step()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for (name, p), q in zip(stack.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_compiled_layer_is_one_graph(by, tolerances, device, norm):
    layer = TransformerEncoderLayer(D, HEADS, 2 * D, norm=norm, dropout=0.0, backend=by)
    layer.to(device)
    x = torch.randn(SENTENCES, LENGTH, D, device=device, requires_grad=True)
    code = "inductor" if REAL else "aot_eager"
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
