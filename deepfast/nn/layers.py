"""One encoder and one decoder layer, pre-norm or post-norm.

A pre-norm layer inside a stack is entered after its first layer-norm and left before its last
residual add, so that the boundary between two layers, which does both, is one pass over memory:

    pre-norm    (x, n = LN(x)) -> (r = x + attention(n), f = feed_forward(LN(r)))
    post-norm   x              -> LN(r + feed_forward(r)) with r = LN(x + attention(x))
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from deepfast import ops

from .attention import KeyValueCache, MultiheadAttention
from .layer_norm import LayerNorm
from .packing import Packing

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


def _bare(module: nn.Module, kind: type) -> bool:
    """Whether calling ``module`` is its arithmetic and no more: not replaced, nothing hung on."""
    hung = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module._compiled_call_impl,
        "forward" in vars(module),
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
    return type(module) is kind and not any(hung)


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
        return self._rest(self.up(x))

    def after_norm(
        self, norm: LayerNorm, x: Tensor, residual: Tensor, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        """``s = residual + dropout(x)`` and the branch of ``LN(s)``; LN's output is not kept."""
        if not (_bare(norm, LayerNorm) and _bare(self.up, nn.Linear)):
            n, s = norm(x, residual=residual, dropout_p=dropout_p)
            return s, self(n)
        h, s = ops.norm_linear(
            x,
            norm.weight,
            norm.bias,
            self.up.weight,
            self.up.bias,
            norm.eps,
            residual=residual,
            dropout_p=dropout_p,
            training=self.training,
            backend=norm.backend,
        )
        return s, self._rest(h)

    def _rest(self, h: Tensor) -> Tensor:
        h = ACTIVATIONS[self.activation](h)
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
        backend: see `deepfast.backend`.
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
        self.attention = MultiheadAttention(dim, heads, dropout=attention_dropout, backend=backend)
        self.feed_forward = FeedForward(dim, ffn_dim, activation, activation_dropout)
        own_first = norm == "post" or first_norm
        self.attention_norm = LayerNorm(dim, backend=backend) if own_first else None
        self.feed_forward_norm = LayerNorm(dim, backend=backend)

    def body(self, x: Tensor, n: Tensor | None, packing: Packing) -> Tensor | tuple[Tensor, Tensor]:
        """(x, LN(x)) to the layer's last residual and branch; in post-norm x to its output."""
        a = self.attention(x if n is None else n, packing)
        if self.norm == "pre":
            return self.feed_forward.after_norm(self.feed_forward_norm, a, x, self.dropout)
        x, _ = self.attention_norm(a, residual=x, dropout_p=self.dropout)
        y, _ = self.feed_forward_norm(self.feed_forward(x), residual=x, dropout_p=self.dropout)
        return y

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        normed: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer on its own: (B, S, D) to (B, S, D); True in the mask is padding.

        In a stack, with the packing of its tokens: x (T, D) and, in pre-norm, ``normed``, LN(x), to
        the layer's last residual and branch; in post-norm to its output. A stack calls the module,
        so that whatever hangs on it (hooks, compilation, sharding) is met.
        """
        if packing is not None:
            return self.body(x, normed, packing)
        x_BSD = x
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        x = packing.pack(x_BSD)
        if self.norm == "post":
            return packing.unpack(self.body(x, None, packing))
        residual, branch = self.body(x, self.attention_norm(x), packing)
        return packing.unpack(residual + F.dropout(branch, self.dropout, self.training))


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
        self.attention = MultiheadAttention(dim, heads, dropout=attention_dropout, backend=backend)
        self.cross_attention = MultiheadAttention(
            dim, heads, dropout=attention_dropout, cross=True, backend=backend
        )
        self.feed_forward = FeedForward(dim, ffn_dim, activation, activation_dropout)
        own_first = norm == "post" or first_norm
        self.attention_norm = LayerNorm(dim, backend=backend) if own_first else None
        self.cross_attention_norm = LayerNorm(dim, backend=backend)
        self.feed_forward_norm = LayerNorm(dim, backend=backend)

    def body(
        self,
        x: Tensor,
        n: Tensor | None,
        packing: Packing,
        memory: tuple[Tensor, Tensor],
        memory_packing: Packing,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(x, LN(x)) to the layer's last residual and branch; in post-norm x to its output."""
        p = self.dropout
        a = self.attention(x if n is None else n, packing, causal=True, cache=cache)
        if self.norm == "pre":
            n, x = self.cross_attention_norm(a, residual=x, dropout_p=p)
        else:
            n, _ = self.attention_norm(a, residual=x, dropout_p=p)
            x = n
        c = self.cross_attention(n, packing, memory=memory, memory_packing=memory_packing)
        if self.norm == "pre":
            return self.feed_forward.after_norm(self.feed_forward_norm, c, x, p)
        x, _ = self.cross_attention_norm(c, residual=x, dropout_p=p)
        y, _ = self.feed_forward_norm(self.feed_forward(x), residual=x, dropout_p=p)
        return y

    def forward(
        self,
        x: Tensor,
        memory: Tensor | tuple[Tensor, Tensor],
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        *,
        normed: Tensor | None = None,
        packing: Packing | None = None,
        memory_packing: Packing | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer on its own: (B, T, D) and the encoder's (B, S, D) to (B, T, D).

        In a stack, with the packing of its tokens: as the encoder layer, with the keys and values
        that `MultiheadAttention.project_memory` made of the memory.
        """
        if packing is not None:
            return self.body(x, normed, packing, memory, memory_packing, cache)
        x_BSD, memory_BSD = x, memory
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        memory_packing = Packing.of(*memory_BSD.shape[:2], memory_key_padding_mask)
        memory = self.cross_attention.project_memory(
            memory_packing.pack(memory_BSD), memory_packing
        )
        x = packing.pack(x_BSD)
        if self.norm == "post":
            return packing.unpack(self.body(x, None, packing, memory, memory_packing))
        residual, branch = self.body(x, self.attention_norm(x), packing, memory, memory_packing)
        return packing.unpack(residual + F.dropout(branch, self.dropout, self.training))
