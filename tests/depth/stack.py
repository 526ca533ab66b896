"""A stack of cheap layers around a DLCL, and the same stack without the engine."""

import contextlib
import gc

import pytest
import torch
from torch import nn

from deepfast.nn import DLCL, DepthHistory

LAYERS, DIM, TOKENS = 9, 12, 5
MODES = pytest.mark.parametrize("inplace", [True, False])


class Stack(nn.Module):
    """Cheap layers around a DLCL."""

    def __init__(self, layers=LAYERS, dim=DIM, **options):
        super().__init__()
        self.dlcl = DLCL(layers, dim, **options)
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(layers, dim))
        with torch.no_grad():
            # With norm weights of one the sum of a layer-norm's output is constant: no gradient.
            for p in self.dlcl.parameters():
                p.mul_(1 + 0.3 * torch.randn_like(p))

    def xs(self, y, history):
        """Every x_1 .. x_{L+1}."""
        xs = [self.dlcl(y, history)]
        for scale in self.scales:
            xs.append(self.dlcl(torch.tanh(xs[-1] * scale), history))
        return xs

    def forward(self, y, history):
        return self.xs(y, history)[-1]


def plain_xs(stack, y):
    """The same without the engine: plain autograd through everything (pre-norm)."""
    d, z, xs = stack.dlcl, [], []
    w = d.effective_weight()
    for row in range(d.num_layers + 1):
        state = y if row == 0 else torch.tanh(xs[-1] * stack.scales[row - 1])
        if row and d.norm == "pre":
            state = nn.functional.layer_norm(
                state, (d.dim,), d.norm_weight[row], d.norm_bias[row], d.eps
            )
        z.append(state)
        xs.append(sum(w[row, k] * z[k] for k in range(row + 1)))
    return xs


def leaf(*shape):
    return torch.randn(shape or (TOKENS, DIM), requires_grad=True)


def history(inplace=True):
    return DepthHistory(inplace=inplace, block=4)


@contextlib.contextmanager
def no_gc():
    """Turns the garbage collector off: reference counts alone must free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
