"""The engine on GPU kernels without a GPU: Triton's in its interpreter, CUDA's emulated, whose far
passes are Triton's."""

import pytest
import torch

from deepfast import backend
from deepfast.nn import DepthHistory, TransformerEncoder
from tests.depth.stack import Stack, assert_rounded_once, compare, results


@pytest.fixture(params=["triton", "cuda"])
def server(request):
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(f"{reason}; tests/gpu covers the engine on a GPU")
    return request.param


CASES = [
    ({}, torch.float32),
    ({}, torch.bfloat16),
    ({}, torch.float16),
    ({"norm": "post"}, torch.float32),
    ({"norm": None, "weight_type": "vector"}, torch.float32),
    ({"weight_type": "group", "groups": 3, "softmax": True}, torch.float32),
    ({"window": 3}, torch.float32),
    ({"dilation": 2, "normalize_embedding": True}, torch.float32),
    ({"period": 3, "weight_type": "vector"}, torch.bfloat16),
]


@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_a_chain_agrees(server, tolerances, options, dtype):
    """Blocks of two rows: far passes with one and with several blocks behind them."""
    with backend.record() as seen:
        compare(tolerances, Stack("dlcl", 4, 20, backend=server, **options), dtype, block=2)
    assert set(seen) == {("boundary", server)}


def residuals(backend, dtype, options):
    """A chain with attention residuals: its output and every gradient by name."""
    torch.manual_seed(1)
    stack = Stack("attnres", 4, 20, backend=backend, **options)
    stack = stack.double() if dtype == torch.float64 else stack
    y, dout = torch.randn(2, 3, 20).bfloat16().to(dtype)
    plain = stack.push
    stack.push = lambda y, h: plain(y, h, residual=y, dropout_p=0.3, seed=len(h))
    return results(stack, DepthHistory(block=2), y, dout)


ATTENTION = [{}, {"block": 2}, {"window": 3}, {"score_function": "relu"}, {"norm_affine": True}]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", ATTENTION, ids=str)
@pytest.mark.parametrize("server", ["triton"], indirect=True)
def test_attention_residuals_agree(server, tolerances, options, dtype):
    with backend.record() as seen:
        got = residuals(server, dtype, options)
    assert set(seen) == {("attention_boundary", server)}
    plain, exact = (residuals("reference", d, options) for d in (dtype, torch.float64))
    tolerances.assert_all_accurate(got, plain, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_once(server, dtype):
    assert_rounded_once("dlcl", server, dtype)
    if server == "triton":
        assert_rounded_once("attnres", server, dtype)


@pytest.mark.parametrize(
    "server", ["cuda", pytest.param("triton", marks=pytest.mark.exhaustive)], indirect=True
)
def test_more_than_32_sources(server, tolerances):
    compare(tolerances, Stack("dlcl", 35, 8, backend=server), tokens=2)


def test_no_tokens(server):
    stack, none = Stack("dlcl", 5, 16, backend=server), torch.randn(0, 16)
    found = results(stack, DepthHistory(block=2), none, none)
    assert found.pop("out").shape == found["y"].shape == (0, 16)
    assert all(grad.eq(0).all() for grad in found.values())


def test_a_whole_encoder_agrees(server):
    """All kernels of the package together, with dropout: the masks are the reference's."""
    outputs = {}
    # Where attention is torch's, so is the mask on its weights.
    attention_dropout = 0.0 if server in backend.SDPA else 0.2
    for name in (server, "reference"):
        torch.manual_seed(5)
        encoder = TransformerEncoder(
            3, 16, 2, 24, dropout=0.2, attention_dropout=attention_dropout, backend=name
        )
        x = torch.randn(3, 5, 16, requires_grad=True)
        padding = torch.arange(5) >= torch.tensor([[5], [2], [4]])
        with backend.record() as seen:
            y = encoder(x, padding)
            grads = torch.autograd.grad(y.square().sum(), [x, *encoder.parameters()])
        # Where CUDA C++ has no kernel, Triton's run.
        served = ("boundary", "attention") if name == "cuda" else backend.OPS
        assert set(seen) == {(op, name if op in served else "triton") for op, _ in seen}
        outputs[name] = [y, *grads]
    for a, b in zip(*outputs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
