"""The loss of a projection to the vocabulary, forward and backward, beside torch's forms."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import ops
from deepfast.memory import LiveBytes

TOKENS, DIM, VOCABULARY = 1024, 512, 32000
SMOOTHING = 0.1


def make(
    dtype: torch.dtype, tokens: int = TOKENS, dim: int = DIM, vocabulary: int = VOCABULARY
) -> dict:
    """A step of each implementation on the same numbers; torch's own op where it has one.

    torch's chunked op has no label smoothing, so "torch, chunked" runs without it.
    """
    hidden = torch.randn(tokens, dim).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, dim) / dim**0.5).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))

    def step(loss):
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    variants = {
        "deepfast": step(
            lambda: ops.linear_cross_entropy(hidden, weight, target, label_smoothing=SMOOTHING)
        ),
        "torch": step(
            lambda: F.cross_entropy(
                F.linear(hidden, weight).float(), target, label_smoothing=SMOOTHING
            )
        ),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        variants["torch, chunked"] = step(
            lambda: F.linear_cross_entropy(hidden, weight, target, options=options)
        )
    return variants


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", ["deepfast", "torch", "torch, chunked"])
def test_linear_cross_entropy(benchmark, dtype, who):
    """Time, and peak live bytes of the tensors between ops: scratch memory inside an op is
    hidden."""
    variants = make(dtype)
    if who not in variants:
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    benchmark.pedantic(variants[who], rounds=5, warmup_rounds=1)
    with LiveBytes() as live:
        variants[who]()
    benchmark.extra_info.update(
        peak_bytes=live.peak, logits_bytes=4 * TOKENS * VOCABULARY, tokens=TOKENS
    )
