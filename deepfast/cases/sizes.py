"""The calls that kernels are held to, at sizes that fit no block or vector, and typical ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepfast.cases import ops, stacks
from deepfast.cases.case import Case, Rows
from deepfast.cases.ops import Heads


@dataclass(frozen=True)
class Sizes:
    """Tokens, and numbers of channels: odd, a multiple of 16 bytes, and neither."""

    tokens: int
    odd: int
    even: int
    misfit: int
    many: int = 35
    """Sources, more than the 32 that some kernels take at once."""

    def rows(self, dim: int, apart: int = 0, offset: int = 0, tokens: int | None = None) -> Rows:
        return Rows((self.tokens if tokens is None else tokens,), dim, apart, offset)

    def four(self) -> Iterator[tuple[str, Rows]]:
        """What every op over rows is called with."""
        yield "odd width, rows apart", self.rows(self.odd, apart=3, offset=1)
        yield "aligned", self.rows(self.even)
        yield "rows off 16 bytes", self.rows(self.misfit, offset=1)
        yield "no token", self.rows(self.even, tokens=0)


# Enough tokens that a multiprocessor gets several rows; without a GPU as few as possible.
QUICK = {"cuda": Sizes(1023, 255, 512, 100), "cpu": Sizes(5, 17, 32, 20)}
THOROUGH = {
    "cuda": (Sizes(1, 1, 8, 36), Sizes(8191, 1023, 4096, 1000, 70)),
    "cpu": (Sizes(1, 1, 8, 36),),
}


def layer_norm(s: Sizes) -> Iterator[Case]:
    for name, rows in s.four():
        yield ops.layer_norm(f"{name}, residual, dropout", rows, p=0.3)
        yield ops.rms_norm(f"RMS norm, {name}", rows, p=0.3)
    batch = Rows((2, 3), s.odd, apart=5)
    yield ops.layer_norm("alone, in a batch", batch, residual=False, weight=False, bias=False)
    yield ops.rms_norm("RMS norm, alone", s.rows(s.even), residual=False, weight=False)


def activation(s: Sizes) -> Iterator[Case]:
    for kind in ("relu", "gelu"):
        for name, rows in s.four():
            # The bias comes with dropout, so that each is also left out.
            p = 0.0 if name == "aligned" else 0.3
            yield ops.activation(f"{kind}, {name}", rows, kind, p=p, bias=p > 0)


def norm_linear(s: Sizes) -> Iterator[Case]:
    for name, rows in s.four():
        yield ops.norm_linear(name, rows, 11, p=0.3)
    yield ops.norm_linear("RMS norm", s.rows(s.odd), 11, rms=True, p=0.3)
    yield ops.norm_linear("alone", s.rows(s.odd), 11, residual=False)


def feed_forward(s: Sizes) -> Iterator[Case]:
    for kind in ("relu", "gelu"):
        for name, rows in s.four():
            p = 0.0 if name == "aligned" else 0.3
            yield ops.feed_forward(f"{kind}, {name}", rows, 21, kind, p=p)
    yield ops.feed_forward("RMS norm", s.rows(s.odd), 21, rms=True, p=0.3)


def depth_mix(s: Sizes) -> Iterator[Case]:
    few, misfit = 7, s.rows(s.misfit, tokens=7)
    for name, rows in s.four():
        yield ops.depth_mix(name, rows, 5)
    yield ops.depth_mix("weight per channel, no norm", misfit, 3, norm=(), channels=True)
    yield ops.depth_mix("weight per channel, LN without bias", misfit, 3, norm=("weight",),
                        channels=True)  # fmt: skip
    yield ops.depth_mix("LN without weight", misfit, 2, norm=("bias",))
    yield ops.depth_mix("no norm", misfit, 2, norm=())
    yield ops.depth_mix("many sources", s.rows(s.misfit, 1, 1, few), s.many)


def depth_attention(s: Sizes) -> Iterator[Case]:
    for (name, rows), hops in zip(s.four(), (1, 4, None, 1), strict=True):
        yield ops.depth_attention(f"{name}, {hops or 'no'} hops", rows, 7, hops)
    yield ops.depth_attention("without a gain", s.rows(s.odd), 3, None, gain=False)
    for hops in (None, 2):
        yield ops.depth_attention(f"scores, {hops or 'no'} hops", s.rows(s.misfit), 5, hops,
                                  scored=True)  # fmt: skip
    yield ops.depth_attention("many sources", s.rows(s.misfit, tokens=7), s.many, 2)
    # Weights of each token have the same kernels, without a softmax.
    for streams in (None, 1, 4):
        yield ops.depth_mix_tokens(f"weights of each token, {streams or 'no'} streams",
                                   s.rows(s.misfit), 5, streams)  # fmt: skip
    yield ops.depth_mix_tokens("weights of each token, many sources", s.rows(s.odd, 3), s.many, 3)


def boundary(s: Sizes) -> Iterator[Case]:
    full = {"full": True}
    yield stacks.boundary("odd width, residual, dropout, next norm", s.rows(s.odd), **full)
    yield stacks.boundary("aligned, residual, dropout, next norm", s.rows(s.even), **full)
    yield stacks.boundary("odd width, RMS norms", s.rows(s.odd), norm_kind="rms", **full)
    yield stacks.boundary("post-norm", s.rows(s.misfit), norm="post")
    few = s.rows(s.odd, tokens=7)
    yield stacks.boundary("weight per channel, no norm", few, weight="vector", norm=None)
    yield stacks.boundary("window", s.rows(s.even, tokens=7), window=3)
    yield stacks.boundary("many sources", s.rows(s.misfit, tokens=7), depth=s.many)
    yield stacks.boundary("no token", s.rows(s.even, tokens=0), **full)


def attention_boundary(s: Sizes) -> Iterator[Case]:
    make, full = stacks.attention_boundary, {"full": True}
    yield make("odd width, residual, dropout, next norm", s.rows(s.odd), **full)
    yield make("aligned, residual, dropout, next norm", s.rows(s.even), **full)
    yield make("relu", s.rows(s.misfit), weights="relu")
    yield make("blocks", s.rows(s.even, tokens=7), block=2)
    yield make("window", s.rows(s.odd, tokens=7), window=3)
    yield make("many sources", s.rows(s.misfit, tokens=7), depth=s.many)
    yield make("no token", s.rows(s.even, tokens=0), **full)


def attention(s: Sizes) -> Iterator[Case]:
    short = [1, 9, 0, min(s.tokens, 61), 5]
    long = [s.tokens // 2 + 1, 3]
    make = ops.attention
    yield make("short, causal, dropout", short, None, Heads(2, 32), causal=True, p=0.3)
    yield make("long", long, None, Heads(2, 16))
    yield make("cross", [7, 3, 0, 5], [s.tokens // 8 + 3, 1, 9, 0], Heads(3, 8), p=0.1)
    width = 40 if s.tokens > 5 else 10
    yield make("odd width", [9, 2], None, Heads(1, width), causal=True, p=0.1)
    yield make("groups, causal", short, None, Heads(4, 32, 2), causal=True, p=0.3)
    yield make("groups, long, window", long, None, Heads(4, 16, 4), causal=True, p=0.1,
               window=s.tokens // 8)  # fmt: skip
    yield make("window", short, None, Heads(2, 16), window=(3, 2))
    yield make("window, long, cross", long, [s.tokens, 9], Heads(2, 16), p=0.1, window=(2, 40))
    yield make("no sentence", [], None, Heads(2, 16))


def linear_cross_entropy(s: Sizes) -> Iterator[Case]:
    make = ops.linear_cross_entropy
    odd = s.rows(s.even, apart=3)
    yield make("odd vocabulary, ignored targets", odd, 4 * s.odd + 1, chunk=4 * s.tokens // 7 + 1)
    yield make("aligned, no smoothing", s.rows(s.misfit, tokens=s.tokens // 2 + 1), 4 * s.even,
               smoothing=0.0, bias=True)  # fmt: skip
    # The mean of no token is nan.
    yield make("no token", s.rows(s.even, tokens=0), s.even, reduction="sum")


def peephole_lstm(s: Sizes) -> Iterator[Case]:
    batch = 33 if s.tokens > 5 else 3
    make = ops.peephole_lstm
    yield make("odd width, lengths, reversed", 5, batch, s.odd, reverse=True, begun=True)
    yield make("odd width, lengths", 4, batch, s.odd, begun=True)
    yield make("aligned", 3, batch, s.even)
    yield make("no sentence", 2, 0, s.misfit, begun=True)


KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    make.__name__: make
    for make in (
        layer_norm, activation, depth_mix, depth_attention, boundary, attention_boundary,
        attention, linear_cross_entropy, peephole_lstm,
    )
}  # fmt: skip
"""By the ops of `deepfast.backend.OPS`: the calls that their kernels are held to."""

PRODUCTS = {"norm_linear": norm_linear, "feed_forward": feed_forward}
"""Ops that combine such kernels with torch's matrix products."""


def typical(op: str, width: int, kind: str, tokens: int | None = None) -> Case:
    """A typical call at ``width`` on a device of type ``kind``. By default it has as many tokens as
    are timed: enough that a kernel takes longer than its launch."""
    T = tokens or ((1 << 23) // width if kind == "cuda" else 2)
    name, rows, gpu = f"width {width}", Rows((T,), width), kind == "cuda"
    lengths = [width] * max(1, (8192 if gpu and tokens is None else 1) // width)
    # The reference holds all weights of a sentence, in float64.
    heads = Heads(2 if tokens else 8, 64) if gpu else Heads(1, 16)
    hidden = Rows((min(T, 2048),), 512 if gpu else 8)
    made = {
        "boundary": lambda: stacks.boundary(name, rows, depth=8, full=True),
        "attention_boundary": lambda: stacks.attention_boundary(name, rows, depth=8, full=True),
        "depth_mix": lambda: ops.depth_mix(name, rows, 8),
        "depth_attention": lambda: ops.depth_attention(name, rows, 8, gain=False),
        "layer_norm": lambda: ops.layer_norm(name, rows, p=0.1),
        "activation": lambda: ops.activation(name, rows, "relu", p=0.1, bias=False),
        "attention": lambda: ops.attention(name, lengths, None, heads),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(name, hidden, 8 * width),
        "peephole_lstm": lambda: ops.peephole_lstm(name, 16 if gpu else 2, min(T, 64), width),
    }
    return made[op]()


def cases(op: str, kind: str, widths: tuple[int, ...], thorough: bool = False) -> Iterator[Case]:
    """The calls that backends are held to on devices of type ``kind``: odd sizes, then typical
    ``widths``, with fewer tokens than are timed."""
    torch.manual_seed(1)
    for sizes in (QUICK[kind], *(THOROUGH[kind] if thorough else ())):
        yield from KERNELS[op](sizes)
    for width in widths:
        yield typical(op, width, kind, tokens=256 if kind == "cuda" else 2)
