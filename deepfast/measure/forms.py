"""Other ways to compute DLCL, as published, for measurements beside deepfast.

All take the same inputs, compute the same pre-norm formula ``x_{l+1} = sum_{k<=l} W[l,k]
LN_k(y_k)`` and differ in how they sum over layers. A connection is called like `deepfast.nn.DLCL`,
but has its own history: ``x = connect(y)``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.nn import DLCL, DepthHistory


class _Connection:
    """One forward pass through a stack; shares the parameters of a DLCL module."""

    mix: Callable[[Tensor], Tensor]
    """From z_k = LN_k(y_k) to x_{k+1}; each form has its own."""

    def __init__(self, dlcl: DLCL):
        self.dlcl = dlcl
        self.weight = dlcl.weight
        self.count = 0

    def norm(self, y: Tensor) -> Tensor:
        """LN_k of the paper; index 0 has none unless the module sets normalize_embedding."""
        k, m = self.count, self.dlcl
        if m.norm != "pre" or (k == 0 and not m.normalize_embedding):
            return y
        return F.layer_norm(y, (m.dim,), m.norm_weight[k], m.norm_bias[k], m.eps)

    def __call__(self, y: Tensor) -> Tensor:
        x = self.mix(self.norm(y))
        self.count += 1
        return x


class StackAndSum(_Connection):
    """Stacks all layers, multiplies by their weights, sums: the form of the DLCL paper's code."""

    def __init__(self, dlcl: DLCL):
        super().__init__(dlcl)
        self.states: list[Tensor] = []

    def mix(self, z: Tensor) -> Tensor:
        self.states.append(z)
        weight = self.weight[self.count, : self.count + 1].to(z.dtype)
        return (torch.stack(self.states) * weight.view(-1, *(1,) * z.dim())).sum(0)


class AddLoop(_Connection):
    """A running sum of weight times layer: no stack, one read and one write of x per term."""

    def __init__(self, dlcl: DLCL):
        super().__init__(dlcl)
        self.states: list[Tensor] = []

    def mix(self, z: Tensor) -> Tensor:
        self.states.append(z)
        weight = self.weight[self.count].to(z.dtype)
        x = weight[0] * self.states[0]
        for k in range(1, len(self.states)):
            x = x + weight[k] * self.states[k]
        return x


class _Append(torch.autograd.Function):
    """Writes a layer into the shared buffer and returns the filled part.

    The view is made outside autograd, so writing the next layer does not invalidate it. Its
    gradient goes in two parts: the older layers' to the previous append, the newest layer's to that
    layer.
    """

    @staticmethod
    def forward(ctx, buffer, filled, index, z):
        buffer[index] = z
        ctx.index = index
        view = buffer.new_empty(0)
        view.set_(buffer.untyped_storage(), 0, (index + 1, *buffer.shape[1:]))
        return view

    @staticmethod
    def backward(ctx, grad):
        older = grad[: ctx.index] if ctx.index else None
        return None, older, None, grad[ctx.index]


class DenseFormerForm(_Connection):
    """One buffer and a tensordot per layer: linear memory, as in DenseFormer's module.

    Pagliardini et al., DenseFormer, NeurIPS 2024.
    """

    def __init__(self, dlcl: DLCL):
        super().__init__(dlcl)
        self.buffer: Tensor | None = None
        self.filled: Tensor | None = None

    def mix(self, z: Tensor) -> Tensor:
        if self.buffer is None:
            self.buffer = z.new_empty(self.weight.shape[0], *z.shape)
        self.filled = _Append.apply(self.buffer, self.filled, self.count, z)
        weight = self.weight[self.count, : self.count + 1].to(z.dtype)
        return torch.tensordot(weight, self.filled, dims=1)


class FusedPerLayer(_Connection):
    """One fused pass per layer over all layers below it: fewest launches, quadratic reads."""

    def __init__(self, dlcl: DLCL):
        super().__init__(dlcl)
        self.states: list[Tensor] = []

    def mix(self, z: Tensor) -> Tensor:
        self.states.append(z)
        return ops.depth_mix(self.states, self.weight[self.count, : self.count + 1])


class Deepfast(_Connection):
    """This package."""

    def __init__(self, dlcl: DLCL):
        super().__init__(dlcl)
        self.history = DepthHistory()

    def __call__(self, y: Tensor) -> Tensor:
        return self.dlcl(y, self.history)


FORMS = {
    "stack and sum": StackAndSum,
    "DenseFormer form": DenseFormerForm,
    "loop of adds": AddLoop,
    "deepfast": Deepfast,
}
"""The forms of DLCL that are compared, deepfast last."""


def mixing_alone(form: type[_Connection], dlcl: DLCL, y: Tensor, grad: Tensor | None) -> Tensor:
    """The connection of a whole stack whose layers do nothing; with ``grad`` also its backward."""
    connect = form(dlcl)
    x = y
    for _ in range(dlcl.num_layers + 1):
        x = connect(x)
    if grad is not None:
        x.backward(grad)
    return x
