"""Other ways to compute attention residuals, full or in blocks, for measurements beside deepfast.

All compute ``x_{l+1} = sum_{k<=l} softmax_k(w_l . RMSNorm(v_k)) v_k`` for every row l, with the
queries of one `deepfast.nn.AttentionResiduals`, and autograd's backward. In blocks the v of a block
are summed. A form is called like the module, but has its own history: ``x = connect(v)``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.nn import AttentionResiduals, DepthHistory


class _Attention:
    """One forward pass through a stack."""

    attend: Callable[[Tensor], Tensor]
    """A row from its query; each form has its own."""

    def __init__(self, residuals: AttentionResiduals):
        self.residuals = residuals
        self.values: list[Tensor] = []
        self.row = 0

    def __call__(self, v: Tensor) -> Tensor:
        if self.residuals.running[self.row]:
            self.values[-1] = self.values[-1] + v
        else:
            self.values.append(v)
        self.row += 1
        return self.attend(self.residuals.query[self.row - 1])

    def normalised(self, v: Tensor) -> Tensor:
        return F.rms_norm(v, (v.shape[-1],), eps=self.residuals.eps)


class Stacked(_Attention):
    """Stacks all sources for every row, as in the pseudocode of the paper (Kimi Team, 2026)."""

    def attend(self, query: Tensor) -> Tensor:
        v = torch.stack(self.values)
        scores = torch.einsum("d,k...d->k...", query, self.normalised(v))
        return torch.einsum("k...,k...d->...d", scores.softmax(0), v)


class Listed(_Attention):
    """Goes through the list of sources for every row: no stack."""

    def attend(self, query: Tensor) -> Tensor:
        scores = torch.stack([self.normalised(v) @ query for v in self.values])
        weights = scores.softmax(0).unsqueeze(-1)
        x = weights[0] * self.values[0]
        for weight, v in zip(weights[1:], self.values[1:], strict=True):
            x = x + weight * v
        return x


class Deepfast:
    """This package."""

    def __init__(self, residuals: AttentionResiduals):
        self.residuals, self.history = residuals, DepthHistory()

    def __call__(self, v: Tensor) -> Tensor:
        return self.residuals(v, self.history)


FORMS = {"stack": Stacked, "list": Listed, "deepfast": Deepfast}
"""The forms of attention residuals that are compared, deepfast last."""


def mixing_alone(form, residuals: AttentionResiduals, v: Tensor, grad: Tensor | None) -> Tensor:
    """The connection of a stack whose layers do nothing; with ``grad`` also its backward."""
    connect = form(residuals)
    x = v
    for _ in range(residuals.rows):
        x = connect(x)
    if grad is not None:
        x.backward(grad)
    return x


class InStack(nn.Module):
    """A form in the place of the `AttentionResiduals` of a stack with layer-norms."""

    def __init__(self, form, residuals: AttentionResiduals):
        super().__init__()
        self.form, self.residuals = form, residuals

    def forward(self, y, history, *, residual, dropout_p, out_norm, want_x):
        if history.owner is None:
            history.owner = self.form(self.residuals)
        v = F.dropout(y, dropout_p, self.training)
        x = history.owner(v if residual is None else v + residual)
        n = F.layer_norm(x, x.shape[-1:], out_norm.weight, out_norm.bias, out_norm.eps)
        return x if want_x else None, n
