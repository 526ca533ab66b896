"""Each op beside the form that plain PyTorch has for it, for `deepfast bench`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.measure import attention_forms, forms
from deepfast.nn import DLCL, AttentionResiduals
from deepfast.reference.peephole_lstm import cell

SMOOTHING = 0.1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all cases."""

    tokens: int = 2048
    """T."""
    dim: int = 512
    """D."""
    sources: int = 24
    """Layers that `depth_mix` and the like read."""
    layers: int = 12
    """Layers of the stacks whose connection is timed."""
    vocabulary: int = 8192
    """Words of the loss."""
    dropout: float = 0.1
    """Where an op has dropout."""
    dtype: torch.dtype = torch.float32
    """Of all operands."""
    device: str = "cpu"
    """Of all operands."""

    def random(self, *shape: int) -> Tensor:
        made = torch.randn(shape, device=self.device) / shape[-1] ** 0.5
        return made.to(self.dtype).requires_grad_()


@dataclass
class Case:
    """A call of an op and the same in plain PyTorch."""

    plain_form: str
    """What PyTorch runs, for a reader."""
    leaves: tuple[Tensor, ...]
    """The operands that get a gradient."""
    ours: Callable
    """Takes the leaves; returns a tensor or a tuple."""
    plain: Callable
    """The same numbers, apart from dropout."""


def layer_norm(s: Sizes) -> Case:
    x, residual = s.random(s.tokens, s.dim), s.random(s.tokens, s.dim)

    def plain(x, residual, weight, bias):
        total = residual + F.dropout(x, s.dropout)
        return F.layer_norm(total, (s.dim,), weight, bias), total

    return Case(
        "dropout, add, layer_norm", (x, residual, s.random(s.dim), s.random(s.dim)),
        lambda x, residual, weight, bias: ops.layer_norm(
            x, weight, bias, residual=residual, dropout_p=s.dropout, training=True
        ),
        plain,
    )  # fmt: skip


def rms_norm(s: Sizes) -> Case:
    x, residual = s.random(s.tokens, s.dim), s.random(s.tokens, s.dim)

    def plain(x, residual, weight):
        total = residual + F.dropout(x, s.dropout)
        return F.rms_norm(total, (s.dim,), weight, 1e-6), total

    return Case(
        "dropout, add, rms_norm", (x, residual, s.random(s.dim)),
        lambda x, residual, weight: ops.rms_norm(
            x, weight, residual=residual, dropout_p=s.dropout, training=True
        ),
        plain,
    )  # fmt: skip


def activation(s: Sizes) -> Case:
    return Case(
        "add, gelu, dropout", (s.random(s.tokens, 4 * s.dim), s.random(4 * s.dim)),
        lambda h, bias: ops.activation(h, "gelu", bias=bias, dropout_p=s.dropout, training=True),
        lambda h, bias: F.dropout(F.gelu(h + bias), s.dropout),
    )  # fmt: skip


def norm_linear(s: Sizes) -> Case:
    x, norm = s.random(s.tokens, s.dim), (s.random(s.dim), s.random(s.dim))
    return Case(
        "layer_norm, linear", (x, *norm, s.random(3 * s.dim, s.dim), s.random(3 * s.dim)),
        ops.norm_linear,
        lambda x, weight, bias, w, b: F.linear(F.layer_norm(x, (s.dim,), weight, bias), w, b),
    )  # fmt: skip


def feed_forward(s: Sizes) -> Case:
    x, norm = s.random(s.tokens, s.dim), (s.random(s.dim), s.random(s.dim))
    up, down = s.random(4 * s.dim, s.dim), s.random(s.dim, 4 * s.dim)

    def plain(x, weight, bias, up, up_bias, down, down_bias):
        h = F.relu(F.linear(F.layer_norm(x, (s.dim,), weight, bias), up, up_bias))
        return F.linear(F.dropout(h, s.dropout), down, down_bias), x

    return Case(
        "layer_norm, linear, relu, dropout, linear",
        (x, *norm, up, s.random(4 * s.dim), down, s.random(s.dim)),
        lambda *leaves: ops.feed_forward(*leaves, activation_dropout_p=s.dropout, training=True),
        plain,
    )


def attention(s: Sizes) -> Case:
    """Sentences of a quarter of the longest length and more."""
    heads = max(1, s.dim // 64)
    count = max(1, s.tokens // 80)
    lengths = torch.linspace(s.tokens / count / 2, s.tokens / count * 3 / 2, count).int()
    lengths[-1] += s.tokens - int(lengths.sum())
    longest = int(lengths.max())
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(s.device)
    real = (torch.arange(longest) < lengths.unsqueeze(1)).to(s.device)

    def padded(x):
        return x.new_zeros(*real.shape, *x.shape[1:]).index_put((real,), x).transpose(1, 2)

    def plain(q, k, v):
        mask = real[:, None, None]
        out = F.scaled_dot_product_attention(padded(q), padded(k), padded(v), mask)
        return out.transpose(1, 2)[real]

    shape = s.tokens, heads, s.dim // heads
    return Case(
        "sentences padded, scaled_dot_product_attention, unpadded",
        tuple(s.random(*shape) for _ in range(3)),
        lambda q, k, v: ops.attention(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest,
            max_seqlen_k=longest,
        ),
        plain,
    )  # fmt: skip


def depth_mix(s: Sizes) -> Case:
    count = s.sources
    sources = [s.random(s.tokens, s.dim) for _ in range(count)]

    def plain(weight, norm_weight, norm_bias, *sources):
        x = torch.zeros_like(sources[0])
        for k, source in enumerate(sources):
            x = x + weight[k] * F.layer_norm(source, (s.dim,), norm_weight[k], norm_bias[k])
        return x

    return Case(
        f"a loop of layer_norm and add over {count} layers",
        (s.random(count), s.random(count, s.dim), s.random(count, s.dim), *sources),
        lambda weight, norm_weight, norm_bias, *sources: ops.depth_mix(
            sources, weight, norm_weight=norm_weight, norm_bias=norm_bias
        ),
        plain,
    )


def _stacked(query: Tensor, *sources: Tensor) -> Tensor:
    """Stack, normalise, score, softmax, sum: the published form of attention over layers."""
    v = torch.stack(sources)
    scores = F.rms_norm(v, v.shape[-1:], eps=1e-6) @ query
    return (scores.softmax(0).unsqueeze(-1) * v).sum(0)


def depth_attention(s: Sizes, op: Callable = ops.depth_attention) -> Case:
    sources = [s.random(s.tokens, s.dim) for _ in range(s.sources)]
    return Case(
        f"a stack of {s.sources} layers, rms_norm, softmax, sum", (s.random(s.dim), *sources),
        lambda query, *sources: op(sources, query), _stacked,
    )  # fmt: skip


def attention_residual(s: Sizes) -> Case:
    return depth_attention(s, lambda sources, query: ops.attention_residual(query, sources))


def linear_cross_entropy(s: Sizes) -> Case:
    target = torch.randint(s.vocabulary, (s.tokens,), device=s.device)

    def plain(hidden, weight):
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)

    return Case(
        f"linear to {s.vocabulary:,} words, cross_entropy",
        (s.random(s.tokens, s.dim), s.random(s.vocabulary, s.dim)),
        lambda hidden, weight: ops.linear_cross_entropy(
            hidden, weight, target, label_smoothing=SMOOTHING
        ),
        plain,
    )


def peephole_lstm(s: Sizes) -> Case:
    steps, width = min(32, s.tokens), s.dim // 2

    def plain(f, weight, peephole):
        h = c = f.new_zeros(f.shape[1], width)
        out = []
        for f_t in f:
            h, c, _ = cell(torch.addmm(f_t, h, weight), c, peephole)
            out.append(h)
        return torch.stack(out)

    return Case(
        f"a loop of ops over {steps} steps",
        (s.random(steps, max(1, s.tokens // steps), 4 * width), s.random(width, 4 * width),
         s.random(3, width)),
        lambda *leaves: ops.peephole_lstm(*leaves)[0],
        plain,
    )  # fmt: skip


def _connection(s: Sizes, connection: DLCL | AttentionResiduals, module, plain: str) -> Case:
    connection = connection.to(s.device, s.dtype)
    with torch.no_grad():
        # Equal weights, as at the start, would hide a mix-up of layers.
        for parameter in connection.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    y = s.random(s.tokens, s.dim)
    forward = {
        name: lambda y, *_, form=module.FORMS[name]: module.mixing_alone(form, connection, y, None)
        for name in ("deepfast", plain)
    }
    return Case(
        f"{s.layers} layers: {plain}", (y, *connection.parameters()), forward["deepfast"],
        forward[plain],
    )  # fmt: skip


CASES: dict[str, Callable[[Sizes], Case]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "activation": activation,
    "norm_linear": norm_linear,
    "feed_forward": feed_forward,
    "attention": attention,
    "depth_mix": depth_mix,
    "depth_attention": depth_attention,
    "attention_residual": attention_residual,
    "linear_cross_entropy": linear_cross_entropy,
    "peephole_lstm": peephole_lstm,
    "DLCL": lambda s: _connection(s, DLCL(s.layers, s.dim), forms, "stack and sum"),
    "AttentionResiduals": lambda s: _connection(
        s, AttentionResiduals(s.layers, s.dim), attention_forms, "stack"
    ),
}
"""The public ops, and the connections of a whole stack whose layers do nothing."""
