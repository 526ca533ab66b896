"""Makes calls of the public ops over sentences: attention, the loss and the LSTM."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.cases import case
from deepfast.cases.case import Calls, Case, Moved, Rows, Sizes, Stored, Typical, values
from deepfast.cases.ops import SEED
from deepfast.reference.peephole_lstm import cell


def offsets(lengths: Sequence[int], device) -> Tensor:
    """(N + 1,) int32: where each sentence begins, and the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class Heads(NamedTuple):
    """Heads of attention."""

    number: int
    width: int
    group: int = 1
    """How many heads share one of the keys."""
    scale: float | None = None
    """The factor of the scores; None for width**-0.5."""


Lengths = Sequence[int]


def attention(
    name: str, queries: Lengths, keys: Lengths, heads: Heads, causal=False, p=0.0, window=None
) -> Case:
    """Sentences of these lengths; where ``keys`` is None theirs are the queries'."""
    keys = queries if keys is None else keys
    shape = {"q": (sum(queries), heads.number), "k": (sum(keys), heads.number // heads.group)}
    shape["v"] = shape["k"]
    given: dict = {n: Rows(lead, heads.width, apart=8).random() for n, lead in shape.items()}
    there = case.on_devices(offsets(queries, "cpu"), offsets(keys, "cpu"))
    options: dict = {"causal": causal, "window": window, "dropout_p": p, "seed": SEED}
    options["scale"] = heads.scale
    options |= {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}

    def run(q, k, v, *, backend=None):
        starts_q, starts_k = there(q.device)
        return ops.attention(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options, backend=backend
        )

    def padded(x, lengths):
        real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        real = real.to(x.device)
        return x.new_zeros(*real.shape, *x.shape[1:]).index_put((real,), x).transpose(1, 2), real

    def plain(_, q, k, v):
        (q, of_q), (k, of_k), (v, _) = padded(q, queries), padded(k, keys), padded(v, keys)
        out = F.scaled_dot_product_attention(q, k, v, of_k[:, None, None], scale=heads.scale)
        return out.transpose(1, 2)[of_q]

    # SDPA's padded form has no windows, and another dropout mask.
    has_plain = not (causal or p or window or heads.group > 1) and queries and min(keys) > 0
    state = sum(queries) * heads.number * heads.width
    pairs = sum(a * b for a, b in zip(queries, keys, strict=True))
    product = 2 * heads.number * heads.width * pairs
    moved, flops = (Moved(4 * state), Moved(8 * state)), (2 * product, 5 * product)
    how = "sentences padded, scaled_dot_product_attention, unpadded"
    return Case(name, "attention", given, run, plain if has_plain else None, how, moved, flops)


def linear_cross_entropy(
    name: str, rows: Rows, vocabulary: int, *, bias=False, weighted=False, chunk=None, **loss
) -> Case:
    """Every fifth target is ignored. loss: the reduction, and the label smoothing if not 0.1."""
    target = torch.randint(vocabulary, rows.lead)
    target[1::5] = -100
    there = case.on_devices(target, (torch.rand if weighted else torch.ones)(rows.lead))
    given: dict = {"x": rows.random(), "linear_weight": case.linear(vocabulary, rows.dim)}
    given |= {"linear_bias": Stored(torch.randn(vocabulary))} if bias else {}
    options: dict = {"label_smoothing": 0.1, "reduction": "mean"} | loss

    def run(x, linear_weight, linear_bias=None, *, backend=None):
        target, factor = there(x.device)
        more = options | {"linear_bias": linear_bias, "chunk_size": chunk, "backend": backend}
        more["token_weight"] = factor if weighted else None
        return ops.linear_cross_entropy(x, linear_weight, target, **more)

    def plain(_, x, linear_weight, linear_bias=None):
        # Torch's product of one row is up to ten times less exact than that of several.
        parts = x.flatten(0, -2).split(chunk or max(1, rows.tokens))
        logits = torch.cat([F.linear(part, linear_weight, linear_bias) for part in parts])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        target, factor = (of_token.flatten() for of_token in there(x.device))
        if not weighted:
            losses = F.cross_entropy(logits, target, **options)
            return losses.view(rows.lead) if losses.dim() else losses
        losses = factor * F.cross_entropy(logits, target, **options | {"reduction": "none"})
        if options["reduction"] == "none":
            return losses.view(rows.lead)
        count = factor[target >= 0].sum() if options["reduction"] == "mean" else 1
        return losses.sum() / count

    product = 2 * rows.tokens * rows.dim * vocabulary
    # Gradients are made in forward, those of each token in backward.
    flops = (product, 3 * product) if options["reduction"] == "none" else (3 * product, 0)
    how = f"linear to {vocabulary:,} words, cross_entropy"
    return Case(name, "linear_cross_entropy", given, run, plain, how, flops=flops)


def loop_of_ops(f, weight, peephole, h0=None, c0=None, *, lengths=None, reverse=False):
    """`peephole_lstm` as a loop of torch's ops over all steps: h, and the last h and c. After the
    end of a sentence h is 0 and the state does not change."""
    zeros = f.new_zeros(f.shape[1], f.shape[2] // 4)
    h, c = zeros if h0 is None else h0, zeros if c0 is None else c0
    out = [zeros] * len(f)
    for t in reversed(range(len(f))) if reverse else range(len(f)):
        new_h, new_c, _ = cell(torch.addmm(f[t], h, weight), c, peephole)
        if lengths is None:
            h, c, out[t] = new_h, new_c, new_h
            continue
        live = (t < lengths).unsqueeze(1)
        h, c = torch.where(live, new_h, h), torch.where(live, new_c, c)
        out[t] = torch.where(live, new_h, 0)
    return torch.stack(out) if out else f.new_zeros(0, *zeros.shape), h, c


def peephole_lstm(
    name: str, steps: int, batch: int, width: int, *, reverse=False, begun=False
) -> Case:
    """``begun``: with first states and sentences of different lengths."""
    given: dict = {
        "f": Rows((steps, batch), 4 * width).random(),
        "weight": Stored(torch.randn(width, 4 * width) / width**0.5),
        "peephole": values(3, width),
    }
    if begun:
        given |= {"h0": Rows((batch,), width).random(), "c0": values(batch, width)}
    lengths = (torch.arange(batch) * 7 + steps) % (steps + 1) if begun else None

    def options(f):
        return {"lengths": None if lengths is None else lengths.to(f.device), "reverse": reverse}

    def run(f, weight, peephole, h0=None, c0=None, *, backend=None):
        return ops.peephole_lstm(f, weight, peephole, h0=h0, c0=c0, **options(f), backend=backend)

    def plain(_, **named):
        return loop_of_ops(**named, **options(named["f"]))

    product, how = 2 * steps * batch * width * 4 * width, f"a loop of ops over {steps} steps"
    return Case(name, "peephole_lstm", given, run, plain, how, flops=(product, 2 * product))


# ---- what kernels must pass ----------------------------------------------------------------------


def attention_calls(s: Sizes) -> Iterator[Case]:
    short = [1, 9, 0, min(s.tokens, 61), 5]
    long = [s.tokens // 2 + 1, 3]
    make = attention
    yield make("short, causal, dropout", short, None, Heads(2, 32), causal=True, p=0.3)
    yield make("long", long, None, Heads(2, 16))
    yield make("cross", [7, 3, 0, 5], [s.tokens // 8 + 3, 1, 9, 0], Heads(3, 8), p=0.1)
    width = 40 if s.tokens > 5 else 10
    yield make("odd width", [9, 2], None, Heads(1, width), causal=True, p=0.1)
    yield make("groups, causal", short, None, Heads(4, 32, 2), causal=True, p=0.3)
    groups, window = Heads(4, 16, 4), s.tokens // 8
    yield make("groups, long, window", long, None, groups, causal=True, p=0.1, window=window)
    yield make("window", short, None, Heads(2, 16), window=(3, 2))
    yield make("window, long, cross", long, [s.tokens, 9], Heads(2, 16), p=0.1, window=(2, 40))
    yield make("no sentence", [], None, Heads(2, 16))


def linear_cross_entropy_calls(s: Sizes) -> Iterator[Case]:
    make = linear_cross_entropy
    odd = s.rows(s.even, apart=3)
    yield make("odd vocabulary, ignored targets", odd, 4 * s.odd + 1, chunk=4 * s.tokens // 7 + 1)
    half = s.rows(s.misfit, tokens=s.tokens // 2 + 1)
    yield make("aligned, no smoothing", half, 4 * s.even, label_smoothing=0.0, bias=True)
    # The mean of no token is nan.
    yield make("no token", s.rows(s.even, tokens=0), s.even, reduction="sum")


def peephole_lstm_calls(s: Sizes) -> Iterator[Case]:
    batch = 33 if s.tokens > 5 else 3
    make = peephole_lstm
    yield make("odd width, lengths, reversed", 5, batch, s.odd, reverse=True, begun=True)
    yield make("odd width, lengths", 4, batch, s.odd, begun=True)
    yield make("aligned", 3, batch, s.even)
    yield make("no sentence", 2, 0, s.misfit, begun=True)


def _typical_attention(t: Typical) -> Case:
    width = t.rows.dim
    lengths = [width] * max(1, (8192 if t.gpu and not t.few else 1) // width)
    # The reference holds all weights of a sentence, in float64.
    heads = Heads(2 if t.few else 8, 64) if t.gpu else Heads(1, 16)
    return attention(t.name, lengths, None, heads)


def _typical_loss(t: Typical) -> Case:
    hidden = Rows((min(t.rows.tokens, 2048),), 512 if t.gpu else 8)
    return linear_cross_entropy(t.name, hidden, 8 * t.rows.dim)


def _typical_lstm(t: Typical) -> Case:
    steps = 16 if t.gpu else 2
    return peephole_lstm(t.name, steps, min(t.rows.tokens, 64), t.rows.dim)


KERNELS = {
    "attention": Calls(attention_calls, _typical_attention),
    "linear_cross_entropy": Calls(linear_cross_entropy_calls, _typical_loss),
    "peephole_lstm": Calls(peephole_lstm_calls, _typical_lstm),
}
