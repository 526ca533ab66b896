"""One decoder layer on one new position of each hypothesis, with as few calls as it takes.

A step of decoding has few rows, so that modules, checks and autograd of a layer take longer than
its arithmetic. They are gone through once, where decoding starts. The arithmetic is the layer's.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import backend as backends
from deepfast.dtypes import compute_dtype
from deepfast.nn.attention import KeyValueCache, MultiheadAttention
from deepfast.nn.feed_forward import FeedForward
from deepfast.nn.layer_norm import plain_norm
from deepfast.nn.layers import TransformerDecoderLayer
from deepfast.nn.linear import plain
from deepfast.nn.packing import Packing
from deepfast.ops import common
from deepfast.ops.activation import KINDS
from deepfast.ops.decoding import cached_attention


def layer_steps(
    layers: Sequence[TransformerDecoderLayer], x_BD: Tensor
) -> list["LayerStep | None"]:
    """For each layer its step; None for one that must run as it is: one with hooks, with parts of
    other types, in training, or unlike x_BD in dtype or device. `compiled(x_BD)` must hold."""
    return [LayerStep(layer, x_BD) if _serves(layer, x_BD) else None for layer in layers]


def _serves(layer: TransformerDecoderLayer, x: Tensor) -> bool:
    kinds: dict[str, type[nn.Module]] = {"": TransformerDecoderLayer, "feed_forward": FeedForward}
    kinds |= dict.fromkeys(("attention", "cross_attention"), MultiheadAttention)
    for name, module in layer.named_modules():
        kind = kinds.get(name, nn.Linear)
        if not (plain(module, kind) or ("norm" in name and plain_norm(module))):
            return False
        if getattr(module, "backend", None) not in (None, "cpu"):
            return False
    if layer.feed_forward.activation not in KINDS:
        return False
    used = all(p.dtype == x.dtype and p.device == x.device for p in layer.parameters())
    return used and not layer.training


class LayerStep:
    """A post-norm layer from x to its output, a pre-norm layer from LN(x) to its last residual and
    its last branch, as `TransformerDecoderLayer`."""

    def __init__(self, layer: TransformerDecoderLayer, x_BD: Tensor):
        attention, cross, block = layer.attention, layer.cross_attention, layer.feed_forward
        self.norm, self.activate = (
            getattr(backends.choose(op, "cpu", x_BD.device, x_BD.dtype)[1], f"{op}_forward")
            for op in ("layer_norm", "activation")
        )
        self.dtype = compute_dtype(x_BD.dtype)
        self.post = layer.norm == "post"
        names = ("attention_norm",) * self.post + ("cross_attention_norm", "feed_forward_norm")
        self.norms = [
            {name: common.parameter(getattr(norm, name), x_BD.dtype) for name in ("weight", "bias")}
            | {"eps": norm.eps, "rms": norm.rms}
            for norm in (getattr(layer, name) for name in names)
        ]
        self.num_heads, self.left = attention.num_heads, attention.window[0]
        self.shares = attention._shares("query_key_value")
        linears = attention.query_key_value, attention.out, cross.query, cross.out, block.down
        self.query_key_value, self.out, self.query, self.cross_out, self.down = (
            (linear.weight, linear.bias) for linear in linears
        )
        self.up, self.kind = block.up.weight, block.activation
        self.up_bias = common.parameter(block.up.bias, x_BD.dtype)

    def __call__(
        self,
        x: Tensor,
        *,
        normed: Tensor | None,
        encoded: tuple[Tensor, Tensor],
        packing: Packing,
        encoded_packing: Packing,
        cache: KeyValueCache,
    ) -> Tensor | tuple[Tensor, Tensor]:
        qkv = F.linear(x if normed is None else normed, *self.query_key_value)
        q, k, v = qkv.split_with_sizes(self.shares, 1)
        a = F.linear(cache.attend(q, k, v, self.num_heads, self.left), *self.out)
        n = self._norm(0, a, x)
        q, sentences = F.linear(n, *self.query), packing.sentences(x.device)
        keys, values = encoded
        c = cached_attention(q, keys, values, sentences, padding=encoded_packing.padding)
        c = F.linear(c, *self.cross_out)
        n = self._norm(1, c, n if self.post else a)
        h = F.linear(n, self.up)
        self.activate(h=h, bias=self.up_bias, kind=self.kind, dropout_p=0.0, out=h)
        f = F.linear(h, *self.down)
        return self._norm(2, f, n) if self.post else (c, f)

    def _norm(self, number: int, x: Tensor, residual: Tensor) -> Tensor:
        """Adds ``residual`` to x, in place, and returns the norm of the sum."""
        norm = self.norms[number]
        y, rstd = torch.empty_like(x), x.new_empty(len(x), dtype=self.dtype)
        mean = None if norm["rms"] else torch.empty_like(rstd)
        results = {"sum": x, "y": y, "mean": mean, "rstd": rstd}
        self.norm(x=x, residual=residual, dropout_p=0.0, **norm, **results)
        return y
