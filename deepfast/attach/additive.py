"""Attention residuals that are added to a model's own residual stream."""

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.attach.sublayers import OP
from deepfast.depth.attention_residuals import AttentionResiduals

KINDS = ("gated", "one")


class AddedResiduals(AttentionResiduals):
    """``x_r = h + gamma_r * sum_k p_rk v_k``: h is the layer's own sum, in its own dtype.

    With gamma = 0 x is h, bit for bit, so that a pretrained model begins as itself. The sum over
    states is that of `AttentionResiduals`.

    Attributes:
        gamma: (rows,), from 0; None where it is 1 for all rows.

    Source: Delta attention residuals, arXiv 2605.18855, 2026, with gamma = 1.
    """

    def __init__(self, num_layers: int, dim: int, *, additive: str, **options):
        checks.choice(OP, KINDS, additive=additive)
        super().__init__(num_layers, dim, **options)
        self.gamma = nn.Parameter(self.query.new_zeros(self.rows)) if additive == "gated" else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if getattr(self, "gamma", None) is not None:
            nn.init.zeros_(self.gamma)

    def add(self, h: Tensor, read: Tensor, row: int) -> Tensor:
        """Row ``row``, from h, the layer's own sum, and ``read``, the sum over states."""
        if self.gamma is None:
            return h + read.to(h.dtype)
        return torch.addcmul(h, read.to(h.dtype), self.gamma[row].to(h.dtype))
