"""Ops and whole stacks on a GPU: CUDA graphs, in whose capture the host may not wait for the
device, and compilation."""

import pytest
import torch

from deepfast.availability import IN_CUDA
from deepfast.cases.case import tuple_of
from deepfast.cases.sizes import KERNELS, typical, widths
from deepfast.nn import DLCL, DepthHistory, Packing, TransformerEncoder, TransformerEncoderLayer

REAL = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, *[pytest.mark.slow] * (not REAL)]
# The interpreter multiplies the bits of bf16 numbers as integers.
HALF = torch.bfloat16 if REAL else torch.float16
LAYERS, D = (30, 512) if REAL else (1, 16)
SENTENCES, LENGTH, HEADS = (64, 32, 8) if REAL else (2, 3, 2)


def make(name, by, device, p):
    """The leaves, and forward and backward of an op or a stack as a function without arguments."""
    if name in KERNELS:
        case = typical(name, widths(name, device)[0], device)
        leaves, by = case.leaves(HALF, HALF, device), by if name in IN_CUDA else "triton"
        return leaves, lambda: gradients(case.run(**leaves, backend=by), leaves)
    lengths = torch.randint(1, LENGTH + 1, (SENTENCES, 1), device=device)
    lengths[0] = LENGTH
    packing = Packing.of(SENTENCES, LENGTH, torch.arange(LENGTH, device=device) >= lengths)
    x = packing.pack(torch.randn(SENTENCES, LENGTH, D, device=device)).to(HALF).requires_grad_()
    if name == "stack":
        model = DLCL(LAYERS, D, backend=by)
    else:
        layers = 2 if REAL else 1
        model = TransformerEncoder(layers, D, HEADS, 2 * D, dropout=p, backend=by)
    leaves = {"x": x} | dict(model.to(device).named_parameters())

    def run():
        if name == "stack":
            history, y = DepthHistory(), x
            for _ in range(LAYERS + 1):
                y = model(y, history, dropout_p=p)
            return gradients(y, leaves)
        with torch.autocast(device, HALF):
            y = model.forward_packed(x, packing)
        return gradients(y, leaves)

    return leaves, run


def gradients(results, leaves):
    """The results, and the gradients of their sum."""
    results = tuple_of(results)
    grads = torch.autograd.grad(results, list(leaves.values()), list(map(torch.ones_like, results)))
    return [*(y.detach() for y in results), *grads]


STACKS = ["stack", "encoder"] if REAL else ["encoder"]
OPS = [*KERNELS] if REAL else ["depth_mix"]


@pytest.mark.parametrize("name", [*OPS, *STACKS])
def test_a_cuda_graph_replays(by, device, capture, name):
    """With other inputs and other parameters, as in training."""
    leaves, run = make(name, by, device, 0.0)
    replay, results = capture(run)
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves.values():
                leaf += 0.1 * torch.randn_like(leaf)
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


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_compiled_layer_is_one_graph(by, tolerances, device, norm):
    layer = TransformerEncoderLayer(D, HEADS, 2 * D, norm=norm, dropout=0.0, backend=by)
    layer.to(device)
    x = torch.randn(SENTENCES, LENGTH, D, device=device, requires_grad=True)
    code = "inductor" if REAL else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=code)

    def run(forward, x):
        found = gradients(forward(x), {"x": x} | dict(layer.named_parameters()))
        return {str(i): t.detach().cpu() for i, t in enumerate(found)}

    got, plain = run(compiled, x), run(layer, x)
    layer.cpu().double()
    for module in layer.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    exact = run(layer, x.detach().cpu().double().requires_grad_())
    tolerances.assert_all_accurate(got, plain, exact, torch.float32)
