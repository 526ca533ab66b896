"""One encoder and one decoder layer, pre-norm or post-norm.

A layer inside a stack is entered after its first layer-norm and left before its last residual
add, so that the boundary between two layers, which does both, is one pass over memory:

    pre-norm    (x, n = LN(x)) -> r = x + attention(n),  f = feed_forward(LN(r))  -> r + f
    post-norm   x              -> y = LN(r + f) with r = LN(x + attention(x))
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import KeyValueCache, MultiheadAttention
from .layer_norm import LayerNorm
from .packing import Packing

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """``W_2 dropout(activation(W_1 x))``."""

    def __init__(self, dim: int, ffn_dim: int, activation: str = "relu", dropout: float = 0.0):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        self.activation, self.dropout = activation, dropout
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = ACTIVATIONS[self.activation](self.up(x))
        if self.dropout > 0:
            h = F.dropout(h, self.dropout, self.training)
        return self.down(h)


class TransformerEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with residual, dropout and layer-norm.

    Args:
        dim, heads, ffn_dim: D, H, F.
        norm: "pre" or "post".
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu" or "gelu".
        first_norm: False where the surrounding stack owns and applies the first pre-norm LN.
        backend: of the layer-norms, see `deepfast.backend`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        ffn_dim: int,
        *,
        norm: str = "pre",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        first_norm: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        self.norm, self.dropout = norm, dropout
        self.attention = MultiheadAttention(dim, heads, dropout=attention_dropout)
        self.feed_forward = FeedForward(dim, ffn_dim, activation, activation_dropout)
        own_first = norm == "post" or first_norm
        self.attention_norm = LayerNorm(dim, backend=backend) if own_first else None
        self.feed_forward_norm = LayerNorm(dim, backend=backend)

    def body(self, x: Tensor, n: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """(x, LN(x)), or (x, x) in post-norm, to the layer's last residual and branch."""
        a = self.attention(n, packing)
        if self.norm == "pre":
            n, x = self.feed_forward_norm(a, residual=x, dropout_p=self.dropout)
        else:
            n, _ = self.attention_norm(a, residual=x, dropout_p=self.dropout)
            x = n
        return x, self.feed_forward(n)

    def forward(self, x_BSD: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """A layer on its own: (B, S, D) to (B, S, D); True in the mask is padding."""
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        x = packing.pack(x_BSD)
        n = self.attention_norm(x) if self.norm == "pre" else x
        residual, branch = self.body(x, n, packing)
        y = residual + F.dropout(branch, self.dropout, self.training)
        return packing.unpack(y if self.norm == "pre" else self.feed_forward_norm(y))


class TransformerDecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, feed-forward. Args as the encoder layer."""

    def __init__(
        self,
        dim: int,
        heads: int,
        ffn_dim: int,
        *,
        norm: str = "pre",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        first_norm: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        self.norm, self.dropout = norm, dropout
        self.attention = MultiheadAttention(dim, heads, dropout=attention_dropout)
        self.cross_attention = MultiheadAttention(dim, heads, dropout=attention_dropout, cross=True)
        self.feed_forward = FeedForward(dim, ffn_dim, activation, activation_dropout)
        own_first = norm == "post" or first_norm
        self.attention_norm = LayerNorm(dim, backend=backend) if own_first else None
        self.cross_attention_norm = LayerNorm(dim, backend=backend)
        self.feed_forward_norm = LayerNorm(dim, backend=backend)

    def body(
        self,
        x: Tensor,
        n: Tensor,
        packing: Packing,
        memory: tuple[Tensor, Tensor],
        memory_packing: Packing,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x, LN(x)), or (x, x) in post-norm, to the layer's last residual and branch."""
        p = self.dropout
        a = self.attention(n, packing, causal=True, cache=cache)
        if self.norm == "pre":
            n, x = self.cross_attention_norm(a, residual=x, dropout_p=p)
        else:
            n, _ = self.attention_norm(a, residual=x, dropout_p=p)
            x = n
        c = self.cross_attention(n, packing, memory=memory, memory_packing=memory_packing)
        if self.norm == "pre":
            n, x = self.feed_forward_norm(c, residual=x, dropout_p=p)
        else:
            n, _ = self.cross_attention_norm(c, residual=x, dropout_p=p)
            x = n
        return x, self.feed_forward(n)

    def forward(
        self,
        x_BSD: Tensor,
        memory_BSD: Tensor,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """A layer on its own: (B, T, D) and the encoder's (B, S, D) to (B, T, D)."""
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        memory_packing = Packing.of(*memory_BSD.shape[:2], memory_key_padding_mask)
        memory = self.cross_attention.project_memory(
            memory_packing.pack(memory_BSD), memory_packing
        )
        x = packing.pack(x_BSD)
        n = self.attention_norm(x) if self.norm == "pre" else x
        residual, branch = self.body(x, n, packing, memory, memory_packing)
        y = residual + F.dropout(branch, self.dropout, self.training)
        return packing.unpack(y if self.norm == "pre" else self.feed_forward_norm(y))
