"""A stack of cheap layers around a depth connection, and the connection in plain torch."""

import contextlib
import gc

import pytest
import torch
from torch import nn

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory
from tests.specifications.connections import PlainHistory

LAYERS, DIM, TOKENS = 9, 12, 5
CONNECTIONS = {
    "dlcl": (DLCL, {}),
    "post-norm": (DLCL, {"norm": "post"}),
    "attnres": (AttentionResiduals, {}),
    "block_attnres": (AttentionResiduals, {"block": 3}),
    "relu": (AttentionResiduals, {"score_function": "relu"}),
}
EACH = pytest.mark.parametrize("name", CONNECTIONS)
INPLACE = pytest.mark.parametrize("inplace", [True, False])


class Stack(nn.Module):
    """``y_0 = embedding``, ``y_{l+1} = tanh(scale_l * x_{l+1})``, a depth connection between."""

    def __init__(self, name="dlcl", layers=LAYERS, dim=DIM, **options):
        super().__init__()
        make, own = CONNECTIONS[name]
        self.depth = make(layers, dim, **own | options)
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(self.depth.rows - 1, dim))
        with torch.no_grad():
            for key, p in self.depth.named_parameters():
                if make is AttentionResiduals:
                    p.add_(torch.randn_like(p))
                elif p.requires_grad:
                    p.mul_(1 + 0.3 * torch.randn_like(p))
                    # Also outside the pattern, where it must not be read.
                    p.add_(0.1 / (layers + 1) * torch.randn_like(p) if key == "weight" else 0)
                    p.add_(0.1 * torch.randn_like(p) if key == "norm_bias" else 0)

    def plain(self, dtype=None):
        return PlainHistory(self.depth, dtype)

    def push(self, y, history, **call):
        if isinstance(history, PlainHistory):
            return history.push(y, **call)
        return self.depth(y, history, **call)

    def layer(self, k, x):
        return torch.tanh(x * self.scales[k].to(x.dtype))

    def xs(self, y, history, layers=None):
        """Every x_1 .. x_{L+1}, or those of the lower layers."""
        xs = [self.push(y, history)]
        for k in range(len(self.scales) if layers is None else layers):
            xs.append(self.push(self.layer(k, xs[-1]), history))
        return xs

    def forward(self, y, history):
        return self.xs(y, history)[-1]


def results(stack, history, y, dout):
    """The output and every gradient by name."""
    y = y.detach().clone().requires_grad_()
    stack.zero_grad()
    out = stack(y, history)
    out.backward(dout.to(out.dtype))
    grads = {name: p.grad for name, p in stack.named_parameters() if p.requires_grad}
    return {"out": out.detach(), "y": y.grad} | grads


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape or (TOKENS, DIM), dtype=dtype, requires_grad=True)


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
