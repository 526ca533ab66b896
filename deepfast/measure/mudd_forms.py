"""Other ways to compute MUDD, for measurements beside deepfast.

All compute ``x_s = sum_k A[k, s] y_k``, ``A = gelu(RMSNorm(y_l) W_1) W_2 + a`` with the parameters
of one `deepfast.nn.MUDD`. A form is called like the module, but has its own history, and returns
the streams one by one: ``streams = connect(y)``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast.nn import MUDD, MUDDHistory


class _Form:
    """One forward pass through a stack."""

    mix: Callable[[Tensor], tuple[Tensor, ...]]
    """The streams from weights (..., K, S); each form has its own."""

    def __init__(self, mudd: MUDD):
        self.mudd = mudd
        self.states: list[Tensor] = []

    def __call__(self, y: Tensor) -> tuple[Tensor, ...]:
        self.states.append(y)
        row = len(self.states) - 2
        if row < 0:
            return (y,) * self.mudd.streams
        n = F.rms_norm(y, (y.shape[-1],), eps=self.mudd.eps)
        dynamic = F.linear(F.gelu(F.linear(n, self.mudd.up[row])), self.mudd.down[row])
        bias = self.mudd.bias[row]
        return self.mix(dynamic.unflatten(-1, bias.shape) + bias)


class Stacked(_Form):
    """Stacks all states for every row and multiplies by einsum, as in the authors' code."""

    def mix(self, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.einsum("k...d,...ks->s...d", torch.stack(self.states), weight).unbind(0)


class Listed(_Form):
    """Goes through the list of states for every stream, as the authors decode: no stack."""

    def mix(self, weight: Tensor) -> tuple[Tensor, ...]:
        streams = []
        for w in weight.unbind(-1):
            x = w[..., 0, None] * self.states[0]
            for k, y in enumerate(self.states[1:], 1):
                x = x + w[..., k, None] * y
            streams.append(x)
        return tuple(streams)


class Deepfast:
    """This package."""

    def __init__(self, mudd: MUDD):
        self.mudd, self.history = mudd, MUDDHistory()

    def __call__(self, y: Tensor) -> tuple[Tensor, ...]:
        first, last = not self.history.states, len(self.history.states) == self.mudd.num_layers
        x = self.mudd(y, self.history)
        if first or last:
            return (x,) * (1 if last else self.mudd.streams)
        return x.unbind(-2)


FORMS = {"stack": Stacked, "list": Listed, "deepfast": Deepfast}
"""The forms of MUDD that are compared, deepfast last."""


class _Idle(torch.autograd.Function):
    """A layer that does nothing: its output is its residual stream. Backward gives ``grad`` to the
    other streams, so that all of them have one."""

    @staticmethod
    def forward(ctx, grad, *streams):
        ctx.grad, ctx.others = grad, len(streams) - 1
        return streams[-1].clone()

    @staticmethod
    def backward(ctx, dy):
        return None, *(ctx.grad,) * ctx.others, dy


def mixing_alone(form, mudd: MUDD, y: Tensor, grad: Tensor) -> Tensor:
    """The connection of a stack whose layers do nothing, forward and backward."""
    connect = form(mudd)
    for _ in range(mudd.num_layers):
        y = _Idle.apply(grad, *connect(y))
    (x,) = connect(y)
    x.backward(grad)
    return x
