"""The engine on GPU kernels without a GPU: Triton's in its interpreter, CUDA's emulated, whose far
passes are Triton's."""

import pytest
import torch

from deepfast import backend
from deepfast.cases import check
from deepfast.cases.sizes import LISTED, Sizes
from deepfast.nn import TransformerEncoder
from tests.depth.stack import assert_rounded_once


@pytest.fixture(params=["triton", "cuda"])
def server(request):
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, "cpu", torch.float32)
    if reason is not None:
        pytest.skip(f"{reason}; tests/gpu covers the engine on a GPU")
    return request.param


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("op", "server"),
    [("boundary", "triton"), ("boundary", "cuda"), ("attention_boundary", "triton")],
    indirect=["server"],
)
def test_listed_calls_agree(server, op, dtype):
    # Many sources take Triton's interpreter minutes.
    sizes = Sizes(3, 7, 16, 12, *([9] if server == "triton" else []))
    for case in LISTED[op](sizes):
        assert check.fault(case, server, dtype, "cpu", runs=1) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_once(server, dtype):
    assert_rounded_once("dlcl", server, dtype)
    if server == "triton":
        assert_rounded_once("attnres", server, dtype)


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
    torch.testing.assert_close(*outputs.values(), rtol=2e-4, atol=2e-4)
