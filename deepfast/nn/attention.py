"""Multi-head attention over packed sentences."""

import torch
from torch import Tensor, nn

from deepfast import backend as backends
from deepfast import checks, ops
from deepfast.depth.connection import part
from deepfast.nn.cache import KeyValueCache
from deepfast.nn.linear import Gate, check_input, gated
from deepfast.nn.packing import Packing
from deepfast.nn.recompute import not_saved
from deepfast.ops import common, decoding, torch_attention
from deepfast.ops.attention import Window, window_sides

FEW = 16
"""Queries a sentence up to which one pass over the keys for each beats matrix products."""


class MultiheadAttention(nn.Module):
    """Scaled dot-product attention with H heads of width d = D / H.

    ``softmax(Q K^T / sqrt(d)) V`` per head, with one projection each for queries, keys and values
    and one for the output. Tokens are packed, so no projection runs over padding.

    Args:
        dim: D.
        num_heads: H, a divisor of D.
        num_kv_heads: G, a divisor of H: heads of keys and values, each for H / G heads of queries
            (grouped-query attention). Keys and values then have G d channels. None means H.
        window: (left, right): a token sees the tokens of its sentence from ``left`` before it to
            ``right`` after it, see `ops.attention`; causal attention has right 0. Padding does not
            count. Self-attention only.
        dropout: probability that an attention weight becomes 0, in training.
        cross: whether keys and values come from another sequence.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Sources: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al. 2023 for grouped
    queries; Beltagy et al. 2020 for windows.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        window: Window = None,
        dropout: float = 0.0,
        cross: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        checks.whole("MultiheadAttention", dim=dim, num_heads=num_heads)
        checks.probability("MultiheadAttention", dropout, argument="dropout")
        checks.flag("MultiheadAttention", cross=cross)
        if dim % num_heads:
            raise ValueError(
                f"MultiheadAttention: num_heads must divide dim {dim}, got {num_heads}"
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        checks.whole("MultiheadAttention", num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"MultiheadAttention: num_kv_heads must divide num_heads {num_heads}, got "
                f"{num_kv_heads}"
            )
        self.window = window_sides("MultiheadAttention", window)
        if cross and max(self.window) >= 0:
            raise ValueError(
                f"MultiheadAttention: window must be None where cross is True, got {window!r}"
            )
        self.dim, self.num_heads, self.dropout, self.cross = dim, num_heads, dropout, cross
        self.num_kv_heads, self.backend = num_kv_heads, backend
        factory: dict = {"device": device, "dtype": dtype}
        if cross:
            self.query = nn.Linear(dim, sum(self._shares("query")), **factory)
            self.key_value = nn.Linear(dim, sum(self._shares("key_value")), **factory)
        else:
            channels = sum(self._shares("query_key_value"))
            self.query_key_value = nn.Linear(dim, channels, **factory)
        self.out = nn.Linear(dim, dim, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the projections to queries, to keys, to values and to the output separately
        with Glorot's uniform; biases are 0."""
        linear: nn.Linear
        for name, linear in self.named_children():  # type: ignore[assignment]
            start = 0
            for share in self._shares(name):
                nn.init.xavier_uniform_(part(linear.weight, slice(start, start + share)))
                start += share
            nn.init.zeros_(linear.bias)

    @torch.no_grad()
    def _scale_values(self, factor: float) -> None:
        """Scales the projection to values."""
        values: nn.Linear = self.key_value if self.cross else self.query_key_value
        values.weight[-self._shares("key_value")[-1] :].mul_(factor)

    def _shares(self, name: str) -> list[int]:
        """Channels of the results of a projection: queries, or keys and values, or all three."""
        keys = self.num_kv_heads * (self.dim // self.num_heads)
        of_queries = [] if name == "key_value" else [self.dim]
        return of_queries + ([keys, keys] if name.endswith("key_value") else [])

    def _split(self, x: Tensor, name: str) -> tuple[Tensor, ...]:
        """The results of a projection: of (T, C) each (T, H, d), of (B, S, C) each (B, H, S, d)."""
        width = self.dim // self.num_heads
        parts = [x.unflatten(-1, (-1, width)) for x in x.split(self._shares(name), -1)]
        return tuple(x if x.dim() == 3 else x.transpose(1, 2) for x in parts)

    def _pads(self, x: Tensor, packing: Packing, other: Packing) -> bool:
        """Whether attention runs over padded sentences, as torch's SDPA does.

        other: of the sentences that x attends to, or that attend to it.
        """
        (x,) = common.autocast(x)
        width = backends.attention_width(x.device, packing.length, other.length)
        name = backends.chosen("attention", self.backend, x.device, x.dtype, width)
        padded = packing.indices is None and packing.padding is not None
        return padded or name in backends.SDPA

    def project_encoded(
        self, encoded_TD: Tensor, packing: Packing, *, decoding: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output; decoding computes them once for all steps.

        (B, G, S, d) where attention runs over padded sentences, as ``decoding`` does; else
        (T, G, d).
        """
        padded = decoding or self._pads(encoded_TD, packing, packing)
        key, value = self._project("key_value", encoded_TD, packing, padded)
        return key, value

    def _project(
        self, name: str, x_TD: Tensor, packing: Packing, padded: bool
    ) -> tuple[Tensor, ...]:
        """The results of a projection, of packed tokens or ``padded`` sentences."""
        linear = getattr(self, name)
        argument = "encoded" if name == "key_value" else "x"
        check_input("MultiheadAttention", argument, x_TD, linear)
        with not_saved(x_TD, linear):
            y = linear(x_TD)
        return self._split(packing.unpack(y) if padded else y, name)

    def forward(
        self,
        x_TD: Tensor,
        packing: Packing,
        *,
        causal: bool = False,
        encoded: Tensor | tuple[Tensor, Tensor] | None = None,
        encoded_packing: Packing | None = None,
        cache: KeyValueCache | None = None,
        gate: Gate | None = None,
    ) -> Tensor:
        """Attends from x to itself, or to ``encoded``.

        Args:
            x_TD: packed tokens (T, D).
            packing: of x.
            causal: a position attends to itself and to earlier ones. Padding must then be on the
                right.
            encoded: the encoder's output, packed, or the result of `project_encoded`.
            encoded_packing: packing of ``encoded``.
            cache: keys and values of earlier positions; x holds one new position per hypothesis,
                and packing is that of the hypotheses.
            gate: scales the result. A tensor must be a scalar, and may require a gradient.

        Returns:
            (T, D), before dropout and residual.
        """
        if self._compiled(x_TD, packing, encoded, cache):
            o = self._decode(x_TD, packing, encoded, encoded_packing, cache)
            return gated(self.out, o, gate)
        encoded_packing = encoded_packing or packing
        if isinstance(encoded, tuple):
            padded = encoded[0].dim() == 4
        else:
            padded = cache is not None or self._pads(x_TD, packing, encoded_packing)
        name = "query" if self.cross else "query_key_value"
        q, *projected = self._project(name, x_TD, packing, padded)
        if isinstance(encoded, Tensor):
            k, v = self._project("key_value", encoded, encoded_packing, padded)
        else:
            k, v = projected if encoded is None else encoded
        run = self._padded if padded else self._packed
        o = run(q, k, v, packing, causal, encoded_packing, cache)
        return gated(self.out, o, gate)

    def _compiled(self, x: Tensor, packing: Packing, encoded, cache: KeyValueCache | None) -> bool:
        """Whether the compiled op for few queries a sentence serves a call of `forward`."""
        if cache is None and not (isinstance(encoded, tuple) and encoded[0].dim() == 4):
            return False
        few = packing.length <= FEW and not (self.training and self.dropout)
        return few and decoding.compiled(x, self.backend)

    def _decode(
        self, x_TD: Tensor, packing: Packing, encoded, encoded_packing, cache: KeyValueCache | None
    ) -> Tensor:
        """The heads' results (T, D) where `_compiled`."""
        if cache is None:
            check_input("MultiheadAttention", "x", x_TD, self.query)
            q, sentences = self.query(x_TD), packing.sentences(x_TD.device)
            padding = encoded_packing.padding
            keys, values = encoded
            return decoding.cached_attention(q, keys, values, sentences, padding=padding)
        check_input("MultiheadAttention", "x", x_TD, self.query_key_value)
        q, k, v = self.query_key_value(x_TD).split(self._shares("query_key_value"), -1)
        return cache.attend(q, k, v, self.num_heads, self.window[0])

    def weights(
        self, x_TD: Tensor, packing: Packing, encoded_TD: Tensor, encoded_packing: Packing
    ) -> Tensor:
        """(B, T, S) attention weights of each position of x, the mean over heads; 0 on padding.

        For pictures only: `forward` does not compute them. Cross-attention only.
        """
        (q,) = self._split(packing.unpack(self.query(x_TD)), "query")
        k, _ = self.project_encoded(encoded_TD, encoded_packing, decoding=True)
        k = k.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        scores = q @ k.transpose(2, 3) * (self.dim // self.num_heads) ** -0.5
        if encoded_packing.padding is not None:
            scores = scores.masked_fill(encoded_packing.padding[:, None, None, :], -torch.inf)
        return scores.softmax(-1).mean(1)

    def _packed(self, q, k, v, packing, causal, encoded_packing, _cache) -> Tensor:
        options: dict = {"causal": causal, "window": self.window, "backend": self.backend}
        for side, sentences in (("q", packing), ("k", encoded_packing)):
            options[f"cu_seqlens_{side}"] = sentences.cu_seqlens(q.device)
            options[f"max_seqlen_{side}"] = sentences.length
        o = ops.attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, **options)
        return o.reshape(q.shape[0], self.dim)

    def _padded(self, q, k, v, packing, causal, encoded_packing, cache) -> Tensor:
        # Padding is on the right, so the causal mask already hides it from every real query.
        padding = None if causal else encoded_packing.padding
        mask = None if padding is None else ~padding[:, None, None, :]
        left, right = self.window[0], 0 if causal else self.window[1]
        if cache is not None:
            k, v, mask = cache.append(k, v, left)
            causal = False
        elif left >= 0 or (right >= 0 and not causal):
            places = torch.arange(packing.length, device=q.device)
            if padding is not None:
                # The packed form has no padding, so here it takes no place.
                places = ((~padding).cumsum(1) - 1).clamp(min=0).unsqueeze(1)
            window = torch_attention.seen(places, places, left, right)
            mask, causal = window if mask is None else mask & window, False
        dropout_p = self.dropout if self.training else 0.0
        o = torch_attention.padded(q, k, v, mask, dropout_p, causal)
        return packing.pack(o.transpose(1, 2).reshape(packing.batch, packing.length, self.dim))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"window={self.window}, dropout={self.dropout}, cross={self.cross}"
        )
