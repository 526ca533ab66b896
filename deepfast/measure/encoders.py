"""The encoders that are compared: deepfast's with different connections, and plain PyTorch's."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast import ops
from deepfast.measure.forms import COMPILED, FORMS, CompiledLoop, InStack
from deepfast.measure.settings import Settings
from deepfast.memory.sizes import Sizes
from deepfast.nn import DLCL, Packing, TransformerEncoder

STACK, LOOP, RESIDUAL, CHECKPOINTED = (
    "stack and sum",
    "loop of adds",
    "plain residual",
    "plain, checkpointed",
)
PLAIN_FORMS = (STACK, LOOP, RESIDUAL, CHECKPOINTED)
"""Encoders of plain torch, in this order: DLCL as in the paper's code; DLCL as a loop of adds; no
depth connection; no depth connection and `torch.utils.checkpoint` around each layer."""

REFERENCE = STACK
"""The form that losses and gradients are compared with: the DLCL paper's code."""

VARIANTS = (RESIDUAL, "deepfast", "DenseFormer form", LOOP, REFERENCE)
"""In the order of every table."""

DROPOUT = 0.1
"""The size of the models whose memory is measured."""


class StepCase:
    """A step at one depth: an input, a target, and all variants over the same parameters."""

    def __init__(self, settings: Settings, depth: int, activation: str = "relu"):
        torch.manual_seed(settings.seed)
        sizes = (depth, settings.dim, settings.num_heads, settings.ffn_dim)
        options: dict[str, Any] = {"dropout": 0.0, "activation": activation}
        self.encoder = TransformerEncoder(*sizes, **options)
        dlcl = self.encoder.connection.depth
        # Away from the initial averages: equal weights would hide a mix-up of layers.
        with torch.no_grad():
            dlcl.weight.mul_(1 + 0.3 * torch.randn_like(dlcl.weight))
            dlcl.norm_weight.add_(0.1 * torch.randn_like(dlcl.norm_weight))

        def beside(connection: str) -> TransformerEncoder:
            """An encoder of the same layers and norms."""
            with torch.device("meta"):
                made = TransformerEncoder(*sizes, connection=connection, **options)
            made.layers, made.connection.norms = self.encoder.layers, self.encoder.connection.norms
            return made

        forms = FORMS | {COMPILED: CompiledLoop}
        self.models = {name: beside("dlcl") for name in forms}
        for name, form in forms.items():
            self.models[name].connection.dlcl = InStack(form, dlcl)
        self.models |= {RESIDUAL: beside("residual"), "deepfast": self.encoder}
        self.x = torch.randn(settings.tokens, settings.dim)
        self.target = torch.randn(settings.tokens, settings.dim)
        self.packing = Packing(settings.batch, settings.length)

    def step(self, variant: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward: the loss, and the gradients of the parameters by name."""
        out = self.models[variant].forward_packed(self.x, self.packing)
        loss = F.mse_loss(out, self.target)
        loss.backward()
        named = self.encoder.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        self.encoder.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def run(self, variant: str) -> None:
        """A step whose results are discarded."""
        self.step(variant)


class PlainLayer(nn.Module):
    """A pre-norm encoder layer of plain torch: (B, S, D) to (B, S, D)."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.query_key_value(self.norm1(x))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(dim // self.num_heads))
        a = self.out(a.transpose(1, 2).reshape(batch, length, dim))
        x = x + F.dropout(a, self.dropout, self.training)
        f = self.down(F.relu(self.up(self.norm2(x))))
        return x + F.dropout(f, self.dropout, self.training)


class PlainEncoder(nn.Module):
    """A pre-norm encoder of plain torch: (B, S, D) to (B, S, D).

    Args:
        form: how layers are connected, one of `PLAIN_FORMS`.
    """

    def __init__(
        self, layers: int, dim: int, num_heads: int, ffn_dim: int, dropout: float = DROPOUT,
        form: str = RESIDUAL,
    ):  # fmt: skip
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList(
            PlainLayer(dim, num_heads, ffn_dim, dropout) for _ in range(layers)
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


class EncoderModel(nn.Module):
    """An embedding, an encoder, and a loss over the vocabulary whose projection is the embedding.

    Args:
        sizes: dim, num_heads, layers and so on; an encoder alone.
        form: for plain torch, which computes all logits at once, one of `PLAIN_FORMS`; for deepfast
            the recompute policy of all layers.
    """

    def __init__(self, sizes: Sizes, form: str):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.dim)
        shape = sizes.num_layers, sizes.dim, sizes.num_heads, sizes.ffn_dim
        self.plain = form in PLAIN_FORMS
        if self.plain:
            self.encoder: nn.Module = PlainEncoder(*shape, form=form)
        else:
            self.encoder = TransformerEncoder(*shape, dropout=DROPOUT, recompute=form)

    def loss(self, tokens_BS: Tensor, target_BS: Tensor) -> Tensor:
        """Mean cross-entropy of (B, S) targets."""
        weight, target = self.embedding.weight, target_BS.flatten()
        y = self.encoder(F.dropout(self.embedding(tokens_BS), DROPOUT, self.training))
        if self.plain:
            return F.cross_entropy(F.linear(y, weight).flatten(0, 1), target)
        hidden = y.flatten(0, 1)
        return ops.linear_cross_entropy(hidden, weight, target)
