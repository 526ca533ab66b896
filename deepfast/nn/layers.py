"""One encoder and one decoder layer, pre-norm or post-norm.

Inside a stack a pre-norm layer starts after its first layer-norm and ends before its last residual
add. The boundary between two layers does both in one pass over memory:

    pre-norm    (x, n = LN(x)) -> (r = x + attention(n), f = feed_forward(LN(r)))
    post-norm   x              -> LN(r + feed_forward(r)) with r = LN(x + attention(x))

Where every sublayer reads the depth connection, a call runs one part: n -> attention(n), and
n -> feed_forward(n).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks
from deepfast.nn.attention import KeyValueCache, MultiheadAttention
from deepfast.nn.feed_forward import ACTIVATIONS, FeedForward
from deepfast.nn.layer_norm import NORMS, LayerNorm, RMSNorm, add_norm, plain_norm
from deepfast.nn.linear import Gate
from deepfast.nn.packing import Packing, packed, packed_pair
from deepfast.nn.recompute import recomputable
from deepfast.ops.attention import Window
from deepfast.policies import POLICIES, RERUN


class _Layer(nn.Module):
    """The common base of encoder and decoder layers: submodules, sizes, the recompute policy."""

    crosses = False
    parts: tuple[str, ...] = ("attention", "feed_forward")
    """The parts that a call may run alone, in order."""

    attention_norm: Any
    cross_attention_norm: Any
    feed_forward_norm: Any

    def __init__(
        self,
        dim: int,
        num_heads: int,
        ffn_dim: int,
        *,
        num_kv_heads: int | None = None,
        window: Window = None,
        norm: str = "pre",
        norm_type: str = "layer",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        first_norm: bool = True,
        later_norms: bool = True,
        recompute: str = "none",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        checks.choice(name, ("pre", "post"), norm=norm)
        checks.choice(name, NORMS, norm_type=norm_type)
        checks.choice(name, POLICIES, recompute=recompute)
        checks.choice(name, ACTIVATIONS, activation=activation)
        checks.whole(name, dim=dim, num_heads=num_heads, ffn_dim=ffn_dim)
        checks.flag(name, first_norm=first_norm, later_norms=later_norms)
        rates = {"dropout": dropout, "attention_dropout": attention_dropout}
        for argument, p in (rates | {"activation_dropout": activation_dropout}).items():
            checks.probability(name, p, argument=argument)
        self.dim, self.norm, self.dropout, self.recompute = dim, norm, dropout, recompute
        made: dict = {"backend": backend, "device": device, "dtype": dtype}
        options: dict = {"num_kv_heads": num_kv_heads, "dropout": attention_dropout} | made
        self.attention = MultiheadAttention(dim, num_heads, window=window, **options)
        if self.crosses:
            self.cross_attention = MultiheadAttention(dim, num_heads, cross=True, **options)
        self.feed_forward = FeedForward(dim, ffn_dim, activation, activation_dropout, **made)
        for part in self.parts:
            has = norm == "post" or (first_norm if part == "attention" else later_norms)
            module = NORMS[norm_type](dim, **made) if has else None
            setattr(self, f"{part}_norm", module)

    @torch.no_grad()
    def _scale(self, alpha: float, beta: float) -> None:
        """Makes a post-norm layer one with ``x' = LN(alpha * x + f(x))``. At the start the
        projections of values, outputs and the feed-forward block have gain beta.

        The stack runs the layer with a gate of 1 / alpha, for which the norms have another eps:
        ``LN(alpha * z; eps) = LN(z; eps / alpha^2)``.
        """
        for attention in self._attentions():
            attention._scale_values(beta)
        # Of a gated block the half that its gate multiplies, so that the branch begins with beta^2.
        gated = self.feed_forward.activation == "swiglu"
        self.feed_forward.up.weight.chunk(1 + gated)[-1].mul_(beta)
        self._scale_outputs(beta)
        for norm in self.modules():
            if isinstance(norm, LayerNorm | RMSNorm):
                norm.eps /= alpha**2

    def _attentions(self) -> list[MultiheadAttention]:
        return [self.attention, self.cross_attention] if self.crosses else [self.attention]

    @torch.no_grad()
    def _scale_outputs(self, factor: float) -> None:
        for linear in (*(a.out for a in self._attentions()), self.feed_forward.down):
            linear.weight.mul_(factor)

    def _attend(
        self, part: str, n: Tensor, packing: Packing, gate: Gate | None, arguments: dict
    ) -> Tensor:
        """The branch of an attention. A module of another type gets no gate."""
        attention, options = getattr(self, part), arguments.get(part, {})
        if isinstance(attention, MultiheadAttention):
            return attention(n, packing, gate=gate, **options)
        branch = attention(n, packing, **options)
        return branch if gate is None else branch * gate

    def _run(
        self,
        x: Tensor,
        packing: Packing,
        arguments: dict[str, dict],
        normed: Tensor | None = None,
        gate: Gate | None = None,
        part: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer, or a part of it, on packed tokens (T, D): what it returns to its stack.

        Args:
            arguments: further ones of each attention, by the name of the part.
        """
        if part == "feed_forward":
            return self.feed_forward(x)
        if part is not None:
            return self._attend(part, x, packing, None, arguments)
        post = self.norm == "post"
        n = x if normed is None else normed
        branch = self._attend("attention", n, packing, gate, arguments)
        # The norm after each attention, in pre-norm that of the next part.
        norms = [self.attention_norm] if post else []
        norms += [self.cross_attention_norm] if self.crosses else []
        norms += [] if post else [self.feed_forward_norm]
        if self.crosses:
            n, s = add_norm(norms[0], branch, x, self.dropout)
            x = n if post else s
            # A rerun of the whole layer computes n anyway, so keeping s would gain nothing.
            backward = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if backward and plain_norm(norms[0]) and self.recompute not in RERUN:
                recomputable(n, norms[0].recompute(s))
            branch = self._attend("cross_attention", n, packing, gate, arguments)
        x, f = self.feed_forward.after_norm(
            norms[-1],
            branch,
            x,
            self.dropout,
            recompute=self.recompute,
            return_norm=post,
            gate=gate,
        )
        if not post:
            return x, f
        return add_norm(self.feed_forward_norm, f, x, self.dropout)[0]

    def _alone(
        self, x: Tensor, packing: Packing, arguments: dict[str, dict], gate: Gate | None
    ) -> Tensor:
        """A layer outside a stack: from packed tokens x to (B, S, D)."""
        if self.norm == "post":
            return packing.unpack(self._run(x, packing, arguments, None, gate))  # type: ignore[arg-type]
        residual, branch = self._run(x, packing, arguments, self.attention_norm(x), gate)
        return packing.unpack(residual + F.dropout(branch, self.dropout, self.training))

    def norms_alone(self, x: Tensor, normed: None = None) -> Tensor:
        """A post-norm layer whose branches are 0; a stack calls it for a layer that is not used."""
        x = self.attention_norm(x)
        return self.feed_forward_norm(self.cross_attention_norm(x) if self.crosses else x)


class TransformerEncoderLayer(_Layer):
    """Self-attention and a feed-forward block, each with residual, dropout and layer-norm.

    Args:
        dim, num_heads, ffn_dim: D, H, F.
        num_kv_heads: heads of keys and values, see `MultiheadAttention`; None for H.
        window: of self-attention, see `MultiheadAttention`.
        norm: "pre" or "post".
        norm_type: "layer" for `LayerNorm`, "rms" for `RMSNorm`, "none" for no norms.
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu", "gelu" or "swiglu" (Shazeer 2020): ``silu(g) * u``, in torch's ops. The
            first product has 2 F channels, g before u, so ``feed_forward.up`` is a Llama's
            gate_proj and up_proj one after the other.
        first_norm: False where the stack around the layer owns and applies the first pre-norm LN.
        later_norms: False where the stack owns the other pre-norm LNs too, and calls the layer
            part by part.
        recompute: the recompute policy, see `deepfast.policies`. The stack around the layer
            implements "layer" and "layer+input".
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.
    """

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        normed: Tensor | None = None,
        packing: Packing | None = None,
        gate: Gate | None = None,
        part: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer outside a stack: (B, S, D) to (B, S, D); True in the mask is padding.

        A stack passes the packing of its tokens; x is then (T, D). In pre-norm it also passes
        ``normed`` = LN(x), and the layer returns its last residual and its last branch. In
        post-norm the layer returns its output.

        Args:
            gate: scales every branch; None counts as 1.
            part: one of ``parts``. x is then the part's normalised input, and the result its
                branch, without dropout and residual.
        """
        if packing is None:
            x, packing = packed("TransformerEncoderLayer", x, self.dim, key_padding_mask)
            return self._alone(x, packing, {}, gate)
        return self._run(x, packing, {}, normed, gate, part)


class TransformerDecoderLayer(_Layer):
    """Causal self-attention, attention to the encoder's output, and a feed-forward block.

    Args as `TransformerEncoderLayer`.
    """

    crosses = True
    parts = ("attention", "cross_attention", "feed_forward")

    def forward(
        self,
        x: Tensor,
        encoded: Tensor | tuple[Tensor, Tensor],
        key_padding_mask: Tensor | None = None,
        encoded_key_padding_mask: Tensor | None = None,
        *,
        normed: Tensor | None = None,
        packing: Packing | None = None,
        encoded_packing: Packing | None = None,
        cache: KeyValueCache | None = None,
        gate: Gate | None = None,
        part: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A layer outside a stack: (B, T, D) and the encoder's (B, S, D) to (B, T, D).

        Padding of x must be on the right, see `TransformerDecoder`. A stack passes packed tokens,
        as to the encoder layer. ``encoded`` is then the packed output of the encoder, or its keys
        and values from `MultiheadAttention.project_encoded`. ``part`` is as in the encoder layer.
        """
        alone = packing is None
        if alone:
            x, packing, encoded, encoded_packing = packed_pair(
                "TransformerDecoderLayer",
                (x, encoded),
                self.dim,
                (key_padding_mask, encoded_key_padding_mask),
            )
        cross = {"encoded": encoded, "encoded_packing": encoded_packing}
        arguments: dict[str, dict] = {"attention": {"causal": True, "cache": cache}}
        arguments["cross_attention"] = cross
        if alone:
            return self._alone(x, packing, arguments, gate)
        return self._run(x, packing, arguments, normed, gate, part)
