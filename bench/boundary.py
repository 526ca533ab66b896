"""One boundary between two layers, forward and backward, and its overhead with few tokens."""

import pytest
import torch

from deepfast.nn import DLCL, DepthHistory, LayerNorm

LAYERS = 8


def make(tokens: int, dim: int, dtype: torch.dtype):
    """A step of LAYERS + 1 boundaries with dropout, residual and the next layer's LN."""
    dlcl, norm = DLCL(LAYERS, dim), LayerNorm(dim)
    branch = torch.randn(tokens, dim).to(dtype).requires_grad_()

    def step():
        history, residual, n = DepthHistory(), None, branch
        for _ in range(LAYERS + 1):
            residual, n = dlcl(
                n, history, residual=residual, dropout_p=0.1, out_norm=norm.as_output()
            )
        n.backward(torch.ones_like(n))

    return step


def boundary_bytes(tokens: int, dim: int, size: int) -> int:
    """Forward: branch, residual and near states read; state, x and LN(x) written. Backward:
    dx, dout, near states and near gradients read; g, dbranch and dresidual written."""
    rows = LAYERS + 1
    near = sum(k % 4 + 1 for k in range(rows))
    return (5 * rows + near + 5 * rows + 2 * near) * tokens * dim * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boundary(measure, dtype):
    tokens, dim = 8192, 512
    size = torch.empty((), dtype=dtype).element_size()
    measure(make(tokens, dim, dtype), boundary_bytes(tokens, dim, size))


def test_boundary_overhead(measure):
    tokens, dim = 8, 64
    measure(make(tokens, dim, torch.float32), boundary_bytes(tokens, dim, 4), rounds=50)
