"""The engine on Triton's kernels, in the interpreter where there is no GPU."""

import pytest
import torch

from deepfast import backend
from deepfast.nn import DLCL, DepthHistory, TransformerEncoder

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    backend.refusal("boundary", "triton", "cpu", torch.float32) is not None,
    reason="Triton's interpreter is off: tests/gpu covers the engine on a GPU",
)

CASES = [
    ({}, torch.float32),
    ({}, torch.bfloat16),
    ({}, torch.float16),
    ({"norm": "post"}, torch.float32),
    ({"norm": None, "weight": "vector"}, torch.float32),
    ({"weight": "group", "groups": 3, "softmax": True}, torch.float32),
    ({"window": 3}, torch.float32),
    ({"dilation": 2, "normalize_embedding": True}, torch.float32),
    ({"period": 3, "weight": "vector"}, torch.bfloat16),
]


@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_a_chain_agrees(tolerances, chain, options, dtype):
    """Blocks of two rows: far passes with one and with several blocks behind them."""
    with backend.record() as seen:
        chain(6, 20, block=2, backend="triton", **options).compare(tolerances, dtype)
    assert set(seen) == {("boundary", "triton")}


@pytest.mark.slow
def test_more_than_32_sources(tolerances, chain):
    chain(35, 8, tokens=2, backend="triton").compare(tolerances, torch.float32)


def test_no_tokens():
    x = torch.randn(0, 16, requires_grad=True)
    dlcl, history = DLCL(5, 16, backend="triton"), DepthHistory(block=2)
    y = x
    for _ in range(6):
        y = dlcl(torch.tanh(y), history)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 16)
    assert all(p.grad.eq(0).all() for p in dlcl.parameters())


def test_a_whole_encoder_agrees():
    """Every kernel of the package, joined, with dropout: the masks are the reference's."""
    outputs = {}
    for name in ("triton", "reference"):
        torch.manual_seed(5)
        encoder = TransformerEncoder(5, 32, 2, 48, dropout=0.2, attention_dropout=0.2, backend=name)
        x = torch.randn(3, 7, 32, requires_grad=True)
        padding = torch.arange(7) >= torch.tensor([[7], [3], [5]])
        with backend.record() as seen:
            y = encoder(x, padding)
            grads = torch.autograd.grad(y.square().sum(), [x, *encoder.parameters()])
        assert {who for _, who in seen} == {name}
        outputs[name] = [y, *grads]
    for a, b in zip(*outputs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_two_runs_give_the_same_bits():
    def run():
        torch.manual_seed(2)
        dlcl, history = DLCL(6, 24, backend="triton"), DepthHistory(block=2)
        x = torch.randn(5, 24, requires_grad=True)
        y = x
        for _ in range(7):
            y = dlcl(torch.tanh(y), history, residual=y, dropout_p=0.3)
        return torch.autograd.grad(y.square().sum(), [x, *dlcl.parameters()])

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)
