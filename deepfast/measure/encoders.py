"""The encoders that are compared: deepfast's with different connections, and plain PyTorch's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast.measure.clock import Row
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    COMPILED,
    FORMS,
    LOOP,
    PER_ROW,
    STACK,
    CompiledLoop,
    FusedPerLayer,
    InStack,
)
from deepfast.measure.settings import Settings
from deepfast.nn import DLCL, Packing, TransformerEncoder

RESIDUAL, CHECKPOINTED = "plain residual", "plain, checkpointed"
PLAIN_FORMS = (RESIDUAL, CHECKPOINTED, STACK)
"""Encoders of plain torch: no depth connection; no depth connection and `torch.utils.checkpoint`
around each layer; DLCL as in the paper's code."""

REFERENCE = STACK
"""The form that losses and gradients are compared with: the DLCL paper's code."""

VARIANTS = (RESIDUAL, "deepfast", "DenseFormer form", LOOP, REFERENCE)
"""Of an encoder with DLCL, in the order of every table."""

ATTENTION, ATTENTION_PER_ROW = "attention residuals", "attention residuals, per row"
"""Variants with two reads a layer, by deepfast and by one fused pass for each row."""

REPLACED = FORMS | {
    COMPILED: CompiledLoop,
    PER_ROW: FusedPerLayer,
    ATTENTION_PER_ROW: ATTENTION_FORMS[PER_ROW],
}
"""Variant -> the form that computes its connection."""

DROPOUT = 0.1
"""The dropout of the models whose memory is measured."""


class StepCase:
    """A step at one depth: an input, a target, and all variants over the same layers. Those with
    DLCL share every parameter."""

    def __init__(
        self, settings: Settings, depth: int, variants: Sequence[str] = VARIANTS,
        activation: str = "relu",
    ):  # fmt: skip
        torch.manual_seed(settings.seed)
        sizes = (depth, settings.dim, settings.num_heads, settings.ffn_dim)
        options: dict[str, Any] = {"dropout": 0.0, "activation": activation}
        self.encoder = TransformerEncoder(*sizes, **options)
        dlcl = self.encoder.connection.depth
        residuals = TransformerEncoder(*sizes, connection="attnres", **options).connection
        # Away from the initial averages: equal weights would hide a mix-up of layers.
        with torch.no_grad():
            dlcl.weight.mul_(1 + 0.3 * torch.randn_like(dlcl.weight))
            dlcl.norm_weight.add_(0.1 * torch.randn_like(dlcl.norm_weight))
            residuals.depth.query.normal_(std=settings.dim**-0.5)

        def beside(name: str) -> TransformerEncoder:
            """An encoder of the same layers; the norms of sublayers are others."""
            reads = name.startswith(ATTENTION)
            kind = "attnres" if reads else "residual" if name == RESIDUAL else "dlcl"
            with torch.device("meta"):
                made = TransformerEncoder(*sizes, connection=kind, **options)
            made.layers = self.encoder.layers
            outer = residuals if reads else self.encoder.connection
            made.connection.norms = outer.norms
            if name != RESIDUAL:
                form = REPLACED.get(name)
                inner = outer.depth if form is None else InStack(form, outer.depth)
                setattr(made.connection, outer.child, inner)
            return made

        self.models = {name: beside(name) for name in variants}
        self.models["deepfast"] = self.encoder
        self.x = torch.randn(settings.tokens, settings.dim)
        self.target = torch.randn(settings.tokens, settings.dim)
        self.packing = Packing(settings.batch, settings.length)

    def step(self, variant: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward: the loss, and the gradients of the parameters by name."""
        model = self.models[variant]
        out = model.forward_packed(self.x, self.packing)
        loss = F.mse_loss(out, self.target)
        loss.backward()
        # A form in the place of a module would lengthen the names.
        named = self.encoder.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def run(self, row: Row) -> None:
        """A step whose results are discarded."""
        self.step(row.variant)


def plain_layer(dim: int, num_heads: int, ffn_dim: int, dropout: float) -> nn.Module:
    """A pre-norm layer of torch. As in deepfast's encoder only its branches have dropout."""
    layer = nn.TransformerEncoderLayer(
        dim, num_heads, ffn_dim, dropout, batch_first=True, norm_first=True
    )
    layer.self_attn.dropout, layer.dropout = 0.0, nn.Identity()  # type: ignore[assignment]
    return layer


class PlainEncoder(nn.Module):
    """A pre-norm encoder of plain torch: (B, S, D) to (B, S, D).

    Args:
        dropout: of each branch.
        form: how layers are connected, one of `PLAIN_FORMS`.
    """

    def __init__(
        self, layers: int, dim: int, num_heads: int, ffn_dim: int, dropout: float = DROPOUT,
        form: str = RESIDUAL,
    ):  # fmt: skip
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList(
            plain_layer(dim, num_heads, ffn_dim, dropout) for _ in range(layers)
        )
        self.dlcl = DLCL(layers, dim) if form in FORMS else None
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        connect = (lambda y: y) if self.dlcl is None else FORMS[self.form](self.dlcl)
        x = connect(x)
        for layer in self.layers:
            if self.form == CHECKPOINTED:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = connect(layer(x))
        return self.norm(x)
