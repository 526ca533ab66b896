"""One encoder and one decoder layer, pre-norm or post-norm.

A pre-norm layer inside a stack is entered after its first layer-norm and left before its last
residual add, so that the boundary between two layers, which does both, is one pass over memory:

    pre-norm    (x, n = LN(x)) -> (r = x + attention(n), f = feed_forward(LN(r)))
    post-norm   x              -> LN(r + feed_forward(r)) with r = LN(x + attention(x))
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.memory.policies import POLICIES, RERUN
from deepfast.nn.attention import KeyValueCache, MultiheadAttention
from deepfast.nn.bare import bare, gated, gated_parameters
from deepfast.nn.connections.latent import Gate
from deepfast.nn.layer_norm import LayerNorm
from deepfast.nn.packing import Packing, packed, packed_pair
from deepfast.nn.recompute import Again
from deepfast.ops.activation import KINDS


class FeedForward(nn.Module):
    """``W_2 dropout(activation(W_1 x))``."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: str = "relu",
        dropout: float = 0.0,
        *,
        backend: str | None = None,
    ):
        super().__init__()
        if activation not in KINDS:
            raise ValueError(f"activation must be one of {', '.join(KINDS)}, got {activation!r}")
        checks.whole("FeedForward", dim=dim, ffn_dim=ffn_dim)
        checks.probability("FeedForward", dropout, argument="dropout")
        self.activation, self.dropout, self.backend = activation, dropout, backend
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, gate: Gate | None = None) -> Tensor:
        return self._rest(self.up(x), gate)

    def after_norm(
        self,
        norm: LayerNorm,
        x: Tensor,
        residual: Tensor,
        dropout_p: float,
        *,
        memory: str = "keep",
        want_norm: bool = False,
        gate: Gate | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``s = residual + dropout(x)`` and the branch of n = LN(s); n in place of s if wanted.

        Neither n nor masks are kept for backward, and the hidden activation by ``memory``. The
        branch is scaled by ``gate``.
        """
        plain = bare(norm, LayerNorm) and bare(self.up, nn.Linear)
        if memory in RERUN or not (plain and bare(self.down, nn.Linear)):
            # When this runs again, it stops in front of the last product: one op could not.
            if want_norm or not plain:
                n, s = norm(x, residual=residual, dropout_p=dropout_p)
                return (n if want_norm else s), self(n, gate)
            h, s = ops.norm_linear(
                x, norm.weight, norm.bias, self.up.weight, self.up.bias, norm.eps,
                residual=residual, dropout_p=dropout_p, training=self.training,
                backend=norm.backend,
            )  # fmt: skip
            return s, self._rest(h, gate)
        down = gated_parameters(self.down, gate)
        branch, s = ops.feed_forward(
            x, norm.weight, norm.bias, self.up.weight, self.up.bias, *down, norm.eps,
            residual=residual, dropout_p=dropout_p, activation=self.activation,
            activation_dropout_p=self.dropout, training=self.training, keep=memory == "keep",
            want_norm=want_norm, backend=norm.backend,
        )  # fmt: skip
        return s, branch

    def _rest(self, h: Tensor, gate: Gate | None = None) -> Tensor:
        h = ops.activation(
            h, self.activation, dropout_p=self.dropout, training=self.training,
            backend=self.backend,
        )  # fmt: skip
        return gated(self.down, h, gate)


class _Layer(nn.Module):
    """What encoder and decoder layers share: parts, sizes, and the memory policy."""

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
        memory: str = "keep",
        backend: str | None = None,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        if memory not in POLICIES:
            raise ValueError(f"memory must be one of {POLICIES}, got {memory!r}")
        name = type(self).__name__
        checks.whole(name, dim=dim, heads=heads, ffn_dim=ffn_dim)
        for argument, p in (
            ("dropout", dropout),
            ("attention_dropout", attention_dropout),
            ("activation_dropout", activation_dropout),
        ):
            checks.probability(name, p, argument=argument)
        self.dim, self.norm, self.dropout, self.memory = dim, norm, dropout, memory
        self.attention = MultiheadAttention(dim, heads, dropout=attention_dropout, backend=backend)
        if self.crosses:
            self.cross_attention = MultiheadAttention(
                dim, heads, dropout=attention_dropout, cross=True, backend=backend
            )
        self.feed_forward = FeedForward(
            dim, ffn_dim, activation, activation_dropout, backend=backend
        )
        own_first = norm == "post" or first_norm
        self.attention_norm = LayerNorm(dim, backend=backend) if own_first else None
        if self.crosses:
            self.cross_attention_norm = LayerNorm(dim, backend=backend)
        self.feed_forward_norm = LayerNorm(dim, backend=backend)

    crosses = False

    def _attend(
        self,
        attention: nn.Module,
        *inputs: Tensor | Packing,
        again: Again | None,
        gate: Gate | None,
        **options,
    ) -> Tensor:
        """The branch of ``attention``; one of another make is told nothing of memory and gate."""
        if isinstance(attention, MultiheadAttention):
            recompute = self.memory == "leaner"
            return attention(*inputs, again=again, recompute=recompute, gate=gate, **options)
        branch = attention(*inputs, **options)
        return branch if gate is None else branch * gate

    def norms_alone(self, x: Tensor) -> Tensor:
        """A post-norm layer whose branches are 0."""
        x = self.attention_norm(x)
        return self.feed_forward_norm(self.cross_attention_norm(x) if self.crosses else x)

    def _end(self, norm: LayerNorm, branch: Tensor, residual: Tensor, gate: Gate | None):
        """From the last attention's branch to the layer's last residual and branch; in post-norm
        to the layer's output. ``norm`` is the one between attention and the feed-forward block."""
        post = self.norm == "post"
        x, f = self.feed_forward.after_norm(
            norm, branch, residual, self.dropout, memory=self.memory, want_norm=post, gate=gate
        )
        if not post:
            return x, f
        y, _ = self.feed_forward_norm(f, residual=x, dropout_p=self.dropout)
        return y


class TransformerEncoderLayer(_Layer):
    """Self-attention and feed-forward, each with residual, dropout and layer-norm.

    Args:
        dim, heads, ffn_dim: D, H, F.
        norm: "pre" or "post".
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu" or "gelu".
        first_norm: False where the surrounding stack owns and applies the first pre-norm LN.
        memory: the policy, see `deepfast.memory`; "states" and "history" are carried out by the
            stack around the layer.
        backend: see `deepfast.backend`.
    """

    def body(
        self,
        x: Tensor,
        n: Tensor | None,
        packing: Packing,
        again: Again | None = None,
        gate: Gate | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(x, LN(x)) to the layer's last residual and branch; in post-norm x to its output.

        again: makes n again in backward, which then does not keep it.
        gate: scales every branch; None is 1.
        """
        source = x if n is None else n
        a = self._attend(self.attention, source, packing, again=again, gate=gate)
        norm = self.feed_forward_norm if n is not None else self.attention_norm
        return self._end(norm, a, x, gate)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        normed: Tensor | None = None,
        packing: Packing | None = None,
        again: Again | None = None,
        gate: Gate | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer on its own: (B, S, D) to (B, S, D); True in the mask is padding.

        In a stack, with the packing of its tokens: x (T, D) and, in pre-norm, ``normed``, LN(x), to
        the layer's last residual and branch; in post-norm to its output. ``again`` makes LN(x)
        again, and every branch is scaled by ``gate``. A stack calls the module, so that whatever
        hangs on it (hooks, compilation, sharding) is met.
        """
        if packing is not None:
            return self.body(x, normed, packing, again, gate)
        x, packing = packed("TransformerEncoderLayer", x, self.dim, key_padding_mask)
        if self.norm == "post":
            return packing.unpack(self.body(x, None, packing))
        residual, branch = self.body(x, self.attention_norm(x), packing)
        return packing.unpack(residual + F.dropout(branch, self.dropout, self.training))


class TransformerDecoderLayer(_Layer):
    """Causal self-attention, attention to the encoder, feed-forward. Args as the encoder layer."""

    crosses = True

    def body(
        self,
        x: Tensor,
        n: Tensor | None,
        packing: Packing,
        memory: Tensor | tuple[Tensor, Tensor],
        memory_packing: Packing,
        cache: KeyValueCache | None = None,
        again: Again | None = None,
        gate: Gate | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(x, LN(x)) to the layer's last residual and branch; in post-norm x to its output."""
        source = x if n is None else n
        a = self._attend(
            self.attention, source, packing, causal=True, cache=cache, again=again, gate=gate
        )
        pre = self.norm == "pre"
        norm = self.cross_attention_norm if pre else self.attention_norm
        n, s = norm(a, residual=x, dropout_p=self.dropout)
        # What runs again makes n with everything else; a maker would keep s for it.
        made = bare(norm, LayerNorm) and self.memory not in RERUN and torch.is_grad_enabled()
        again = norm.again(n, s) if made else None
        c = self._attend(
            self.cross_attention, n, packing, memory=memory, memory_packing=memory_packing,
            again=again, gate=gate,
        )  # fmt: skip
        if pre:
            return self._end(self.feed_forward_norm, c, s, gate)
        return self._end(self.cross_attention_norm, c, n, gate)

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
        again: Again | None = None,
        gate: Gate | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer on its own: (B, T, D) and the encoder's (B, S, D) to (B, T, D). Padding of x
        stands on the right, see `TransformerDecoder`.

        In a stack, with the packing of its tokens: as the encoder layer, with the packed memory, or
        the keys and values that `MultiheadAttention.project_memory` made of it.
        """
        if packing is not None:
            return self.body(x, normed, packing, memory, memory_packing, cache, again, gate)
        x, packing, memory, memory_packing = packed_pair(
            "TransformerDecoderLayer", x, memory, self.dim, key_padding_mask,
            memory_key_padding_mask,
        )  # fmt: skip
        if self.norm == "post":
            return packing.unpack(self.body(x, None, packing, memory, memory_packing))
        residual, branch = self.body(x, self.attention_norm(x), packing, memory, memory_packing)
        return packing.unpack(residual + F.dropout(branch, self.dropout, self.training))
