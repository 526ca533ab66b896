"""Multi-head attention over packed sentences."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import backend as backends
from deepfast import ops
from deepfast.ops import _common as common

from .packing import Packing


@dataclass
class KeyValueCache:
    """Keys and values of the positions decoded so far, (B, H, S, d) each."""

    key: Tensor | None = None
    value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is not None:
            key = torch.cat((self.key, key), dim=2)
            value = torch.cat((self.value, value), dim=2)
        self.key, self.value = key, value
        return key, value

    def reorder(self, index: Tensor) -> None:
        """Keeps sentences ``index`` (B',) of the batch."""
        if self.key is not None:
            self.key, self.value = self.key[index], self.value[index]


class MultiheadAttention(nn.Module):
    """Scaled dot-product attention with H heads of width D / H.

    ``softmax(Q K^T / sqrt(d)) V`` per head, with one projection each for queries, keys and values
    and one for the output. Tokens are packed: no matrix product runs over padding.

    Args:
        dim: D.
        heads: H, a divisor of D.
        dropout: probability of dropping an attention weight while training.
        cross: whether keys and values come from another sequence.
        backend: see `deepfast.backend`.

    Source: Vaswani et al., Attention Is All You Need, 2017.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        dropout: float = 0.0,
        cross: bool = False,
        backend: str | None = None,
    ):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"MultiheadAttention: heads must divide dim {dim}, got {heads}")
        self.dim, self.heads, self.dropout, self.cross = dim, heads, dropout, cross
        self.backend = backend
        if cross:
            self.query = nn.Linear(dim, dim)
            self.key_value = nn.Linear(dim, 2 * dim)
        else:
            self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform init for each D x D block on its own; biases zero."""
        for linear in self.children():
            for block in linear.weight.data.split(self.dim):
                nn.init.xavier_uniform_(block)
            nn.init.zeros_(linear.bias)

    def _heads(self, x_TD: Tensor, packing: Packing, count: int) -> tuple[Tensor, ...]:
        """(T, count * D) to ``count`` tensors (B, H, S, d)."""
        width = self.dim // self.heads
        x = packing.unpack(x_TD)
        x = x.view(packing.batch, packing.length, count, self.heads, width)
        return x.permute(2, 0, 3, 1, 4).unbind(0)

    def _pads(self, x: Tensor, packing: Packing) -> bool:
        """Whether attention runs over padded sentences, as torch's SDPA does."""
        (x,) = common.autocast(x)
        name = backends.chosen("attention", self.backend, x.device.type, x.dtype)
        padded = packing.indices is None and packing.padding is not None
        return padded or name in backends.SDPA

    def project_memory(
        self, memory_TD: Tensor, packing: Packing, *, decoding: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence attended to, made once for a decoder: (B, H, S, d) where
        attention runs over padded sentences, as it does in ``decoding``, else (T, H, d)."""
        kv = self.key_value(memory_TD)
        if decoding or self._pads(memory_TD, packing):
            return self._heads(kv, packing, 2)
        return kv.view(-1, 2, self.heads, self.dim // self.heads).unbind(1)

    def forward(
        self,
        x_TD: Tensor,
        packing: Packing,
        *,
        causal: bool = False,
        memory: tuple[Tensor, Tensor] | None = None,
        memory_packing: Packing | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attends from x to itself, or to ``memory`` from `project_memory`.

        Args:
            x_TD: packed tokens (T, D).
            packing: of x.
            causal: a position sees itself and earlier ones. Padding must then be on the right.
            memory, memory_packing: keys, values and packing of the sequence attended to.
            cache: x holds one new position per sentence; earlier ones are in the cache.

        Returns:
            (T, D), before dropout and residual.
        """
        projection = self.query if self.cross else self.query_key_value
        qkv = projection(x_TD)
        if memory is not None:
            packed = memory[0].dim() == 3
        else:
            packed = cache is None and not self._pads(x_TD, packing)
        run = self._packed if packed else self._padded
        o = run(qkv, packing, causal, memory, memory_packing or packing, cache)
        return self.out(o)

    def _packed(self, qkv, packing, causal, memory, memory_packing, _cache) -> Tensor:
        count = 1 if self.cross else 3
        q, *kv = qkv.view(-1, count, self.heads, self.dim // self.heads).unbind(1)
        o = ops.attention(
            q,
            *(memory or kv),
            cu_seqlens_q=packing.cu_seqlens(qkv.device),
            cu_seqlens_k=memory_packing.cu_seqlens(qkv.device),
            max_seqlen_q=packing.length,
            max_seqlen_k=memory_packing.length,
            causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return o.reshape(qkv.shape[0], self.dim)

    def _padded(self, qkv, packing, causal, memory, memory_packing, cache) -> Tensor:
        q, *kv = self._heads(qkv, packing, 1 if self.cross else 3)
        k, v = memory or kv
        # With padding on the right no real query sees a padded key of the future.
        padding = None if causal else memory_packing.padding
        if cache is not None and not self.cross:
            k, v = cache.append(k, v)
        mask = None if padding is None else ~padding[:, None, None, :]
        o = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, causal and cache is None
        )
        return packing.pack(o.transpose(1, 2).reshape(packing.batch, packing.length, self.dim))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, dropout={self.dropout}, cross={self.cross}"
