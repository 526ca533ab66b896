"""The activation and the dropout after it, forward and backward, beside torch's two ops."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import ops

TOKENS, WIDTH, DROPOUT = 8192, 2048, 0.1


def make(kind: str, dtype: torch.dtype, tokens: int = TOKENS, width: int = WIDTH) -> dict:
    """A step of each implementation on the same numbers, and the bytes a step has to move."""
    h = torch.randn(tokens, width).to(dtype).requires_grad_()
    grad = torch.randn(tokens, width).to(dtype)

    # torch.autograd.grad, not backward: inside a model h is no leaf and no gradient is accumulated.
    def deepfast():
        out = ops.activation(h, kind, dropout_p=DROPOUT, training=True)
        torch.autograd.grad(out, h, grad)

    def plain():
        torch.autograd.grad(F.dropout(getattr(F, kind)(h), DROPOUT), h, grad)

    return {
        "deepfast": deepfast,
        "torch": plain,
        # Forward reads h and writes out; backward reads one of them and dout and writes dh.
        "bytes": 5 * h.numel() * h.element_size(),
    }


@pytest.mark.parametrize("kind", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", ["deepfast", "torch"])
def test_activation(measure, kind, dtype, who):
    variants = make(kind, dtype)
    measure(variants[who], variants["bytes"], rounds=15)
