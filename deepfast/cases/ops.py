"""Makes a call of each public op, with random operands, from its sizes and options."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.cases.case import (
    Case,
    Computed,
    Moved,
    Rows,
    Stored,
    gains,
    linear,
    on_devices,
    values,
)
from deepfast.reference.peephole_lstm import cell

SEED = 5
EPS, RMS_EPS = 1e-5, 1e-6


def _norm(x: Tensor, weight=None, bias=None, *, rms: bool = False) -> Tensor:
    dim = x.shape[-1:]
    return F.rms_norm(x, dim, weight, RMS_EPS) if rms else F.layer_norm(x, dim, weight, bias, EPS)


def _summed(drop, p: float, x: Tensor, residual: Tensor | None) -> Tensor:
    x = drop(x, p, SEED) if p else x
    return x if residual is None else residual + x


# ---- norms and what they are fused with ----------------------------------------------------------


def _norm_parameters(dim: int, rms: bool, weight: bool = True, bias: bool = True) -> dict:
    given = {"weight": gains(dim)} if weight else {}
    return given | ({"bias": values(dim)} if bias and not rms else {})


def layer_norm(
    name: str, rows: Rows, *, rms: bool = False, residual: bool = True, p: float = 0.0,
    weight: bool = True, bias: bool = True,
) -> Case:  # fmt: skip
    """LN or RMS norm of residual + dropout(x); without ``residual`` of dropout(x)."""
    given: dict = {"x": rows.random()}
    if residual:
        given["residual"] = rows.random()
    given |= _norm_parameters(rows.dim, rms, weight, bias)

    def run(x, residual=None, weight=None, bias=None, *, backend=None):
        options = {"residual": residual, "dropout_p": p, "training": True, "seed": SEED}
        if rms:
            return ops.rms_norm(x, weight, **options, backend=backend)
        return ops.layer_norm(x, weight, bias, **options, backend=backend)

    def plain(drop, x, residual=None, weight=None, bias=None):
        s = _summed(drop, p, x, residual)
        y = _norm(s, weight, bias, rms=rms)
        return y if residual is None else (y, s)

    kind = "rms_norm" if rms else "layer_norm"
    state, states = rows.tokens * rows.dim, 1 + residual
    return Case(
        name=name, op="layer_norm", operands=given, run=run, plain=plain,
        how=f"dropout, add, {kind}" if residual else kind,
        moved=(Moved(2 * states * state, 2 * rows.tokens),
               Moved((1 + 2 * states) * state, 2 * rows.tokens)),
    )  # fmt: skip


def activation(
    name: str, rows: Rows, kind: str = "gelu", *, p: float = 0.0, bias: bool = True
) -> Case:
    given: dict = {"h": rows.random()} | ({"bias": values(rows.dim)} if bias else {})

    def run(h, bias=None, *, backend=None):
        return ops.activation(
            h, kind, bias=bias, dropout_p=p, training=True, seed=SEED, backend=backend
        )

    def plain(drop, h, bias=None):
        a = getattr(F, kind)(h if bias is None else h + bias)
        return drop(a, p, SEED) if p else a

    state = rows.tokens * rows.dim
    return Case(
        name=name, op="activation", operands=given, run=run, plain=plain,
        how=f"add, {kind}, dropout", moved=(Moved(2 * state), Moved(3 * state)),
    )  # fmt: skip


def _of_norm(rows: Rows, rms: bool, residual: bool) -> dict:
    """The operands of an op that begins with a norm."""
    given = {"x": rows.random()} | ({"residual": rows.random()} if residual else {})
    norm = _norm_parameters(rows.dim, rms)
    return given | {f"norm_{name}": parameter for name, parameter in norm.items()}


def norm_linear(
    name: str, rows: Rows, outputs: int = 7, *, rms: bool = False, residual: bool = True,
    p: float = 0.0,
) -> Case:  # fmt: skip
    given = _of_norm(rows, rms, residual)
    given |= {"weight": linear(outputs, rows.dim), "bias": Stored(torch.randn(outputs))}

    def run(x, norm_weight, weight, bias, residual=None, norm_bias=None, *, backend=None):
        return ops.norm_linear(
            x, norm_weight, norm_bias, weight, bias, eps=RMS_EPS if rms else EPS, rms=rms,
            residual=residual, dropout_p=p, training=True, seed=SEED, backend=backend,
        )  # fmt: skip

    def plain(drop, x, norm_weight, weight, bias, residual=None, norm_bias=None):
        s = _summed(drop, p, x, residual)
        out = F.linear(_norm(s, norm_weight, norm_bias, rms=rms), weight, bias)
        return out if residual is None else (out, s)

    product = 2 * rows.tokens * rows.dim * outputs
    return Case(
        name=name, op="layer_norm", operands=given, run=run, plain=plain,
        how=f"{'rms' if rms else 'layer'}_norm, linear", flops=(product, 2 * product),
    )  # fmt: skip


def feed_forward(
    name: str, rows: Rows, width: int = 7, kind: str = "gelu", *, rms: bool = False,
    p: float = 0.0, residual: bool = True,
) -> Case:  # fmt: skip
    given = _of_norm(rows, rms, residual)
    given |= {
        "up": linear(width, rows.dim), "up_bias": values(width),
        "down": linear(rows.dim, width), "down_bias": Stored(torch.randn(rows.dim)),
    }  # fmt: skip

    def run(x, norm_weight, residual=None, norm_bias=None, *, backend=None, **linears):
        return ops.feed_forward(
            x, norm_weight, norm_bias, **linears, eps=RMS_EPS if rms else EPS, rms=rms,
            residual=residual, dropout_p=p if residual is not None else 0.0, seed=SEED,
            activation=kind, activation_dropout_p=p, activation_seed=SEED + 1, training=True,
            backend=backend,
        )  # fmt: skip

    def plain(drop, x, norm_weight, up, up_bias, down, down_bias, residual=None, norm_bias=None):
        s = x if residual is None else _summed(drop, p, x, residual)
        h = getattr(F, kind)(F.linear(_norm(s, norm_weight, norm_bias, rms=rms), up, up_bias))
        return F.linear(drop(h, p, SEED + 1) if p else h, down, down_bias), s

    return Case(
        name=name, op="layer_norm", operands=given, run=run, plain=plain,
        how=f"{'rms' if rms else 'layer'}_norm, linear, {kind}, dropout, linear",
    )  # fmt: skip


# ---- over depth ----------------------------------------------------------------------------------


def _sources(rows: Rows, count: int) -> dict:
    """Tensors ``x0``, ``x1`` and so on; every other one lies an element further."""
    return {f"x{k}": rows._replace(offset=rows.offset * (k % 2)).random() for k in range(count)}


def depth_mix(
    name: str, rows: Rows, count: int, *, norm: Sequence[str] = ("weight", "bias"),
    channels: bool = False,
) -> Case:  # fmt: skip
    """``norm``: which parameters the sources' LN has; empty without LN. ``channels``: weights per
    channel."""
    dim = rows.dim
    given = _sources(rows, count)
    given["weight"] = values(count, dim) if channels else values(count)
    made = {"weight": gains, "bias": values}
    given |= {f"norm_{part}": made[part](count, dim) for part in norm}

    def run(weight, norm_weight=None, norm_bias=None, *, backend=None, **sources):
        return ops.depth_mix(
            list(sources.values()), weight, norm_weight=norm_weight, norm_bias=norm_bias,
            backend=backend,
        )  # fmt: skip

    def plain(_, weight, norm_weight=None, norm_bias=None, **sources):
        x = 0
        for k, source in enumerate(sources.values()):
            parts = (None if part is None else part[k] for part in (norm_weight, norm_bias))
            x = x + weight[k] * (_norm(source, *parts) if norm else source)
        return x

    state, product = rows.tokens * dim, 2 * count * rows.tokens * dim
    statistics = 2 * count * rows.tokens if norm else 0
    return Case(
        name=name, op="depth_mix", operands=given, run=run, plain=plain,
        how=f"a loop of layer_norm and add over {count} layers",
        moved=(Moved((count + 1) * state, statistics), Moved((2 * count + 1) * state, statistics)),
        flops=(product, 2 * product),
    )  # fmt: skip


def depth_mix_tokens(name: str, rows: Rows, count: int, streams: int | None = 2) -> Case:
    """`depth_mix` with weights of each token, for ``streams`` sums or one."""
    many = () if streams is None else (streams,)
    given = _sources(rows, count) | {"weight": values(*rows.lead, count, *many)}

    def run(weight, *, backend=None, **sources):
        return ops.depth_mix(list(sources.values()), weight, backend=backend)

    def plain(_, weight, **sources):
        stack = torch.stack(list(sources.values()), -2)
        if weight.dim() < stack.dim():
            return (weight.unsqueeze(-2) @ stack).squeeze(-2)
        return weight.mT @ stack

    product = 2 * (streams or 1) * count * rows.tokens * rows.dim
    return Case(
        name=name, op="depth_attention", operands=given, run=run, plain=plain,
        how="stack, matmul", flops=(product, 2 * product),
    )  # fmt: skip


def attend(sources, query=None, scores=None, norm_weight=None, *, lse: bool = True):
    """Stack, normalise, score, softmax, sum: the published form of attention over depth."""
    v = torch.stack(list(sources), -2)
    if scores is None:
        q = query if norm_weight is None else query * norm_weight
        n = F.rms_norm(v, v.shape[-1:], eps=RMS_EPS)
        scores = n @ q.mT if q.dim() == 2 else n @ q
    many = scores.dim() == v.dim()
    s = scores if many else scores.unsqueeze(-1)
    out = s.softmax(-2).mT @ v
    out = out if many else out.squeeze(-2)
    if not lse:
        return out
    total = s.logsumexp(-2)
    return out, total if many else total.squeeze(-1)


def depth_attention(
    name: str, rows: Rows, count: int, hops: int | None = 1, *, scored: bool = False,
    gain: bool = True, lse: bool = True,
) -> Case:  # fmt: skip
    """Attention by ``hops`` queries, or one without an axis; ``scored``: by given scores."""
    many = () if hops is None else (hops,)
    given = _sources(rows, count)
    if scored:
        given["scores"] = values(*rows.lead, count, *many)
    else:
        given["query"] = Computed(torch.randn(*many, rows.dim) / rows.dim**0.5)
        given |= {"norm_weight": gains(rows.dim)} if gain else {}

    def run(query=None, scores=None, norm_weight=None, *, backend=None, **sources):
        return ops.depth_attention(
            list(sources.values()), query, scores=scores, norm_weight=norm_weight, return_lse=lse,
            backend=backend,
        )  # fmt: skip

    def plain(_, query=None, scores=None, norm_weight=None, **sources):
        return attend(sources.values(), query, scores, norm_weight, lse=lse)

    state, results = rows.tokens * rows.dim, hops or 1
    # The scores and the sum.
    product = (1 if scored else 2) * 2 * results * count * state
    return Case(
        name=name, op="depth_attention", operands=given, run=run, plain=plain,
        how=f"a stack of {count} layers, rms_norm, softmax, sum",
        moved=(Moved((count + results) * state), Moved((2 * count + 2 * results) * state)),
        flops=(product, 2 * product),
    )  # fmt: skip


def attention_residual(name: str, rows: Rows, count: int) -> Case:
    given = _sources(rows, count) | {"query": values(rows.dim)}

    def run(query, *, backend=None, **sources):
        return ops.attention_residual(query, list(sources.values()), backend=backend)

    return Case(
        name=name, op="depth_attention", operands=given, run=run,
        plain=lambda _, query, **sources: attend(sources.values(), query, lse=False),
        how=f"a stack of {count} layers, rms_norm, softmax, sum",
    )  # fmt: skip


# ---- sentences -----------------------------------------------------------------------------------


def offsets(lengths: Sequence[int], device) -> Tensor:
    """(N + 1,) int32: where each sentence begins, and the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class Heads(NamedTuple):
    """Heads of attention."""

    number: int
    width: int
    group: int = 1
    """How many heads share one of the keys."""


def attention(
    name: str, queries: Sequence[int], keys: Sequence[int] | None, heads: Heads, *,
    causal: bool = False, p: float = 0.0, window=None,
) -> Case:  # fmt: skip
    """Sentences of these lengths; without ``keys`` theirs are the queries'."""
    keys = queries if keys is None else keys
    shape = {"q": (sum(queries), heads.number), "k": (sum(keys), heads.number // heads.group)}
    shape["v"] = shape["k"]
    given: dict = {n: Rows(lead, heads.width, apart=8).random() for n, lead in shape.items()}
    longest = max(queries, default=0), max(keys, default=0)

    there = on_devices(offsets(queries, "cpu"), offsets(keys, "cpu"))

    def run(q, k, v, *, backend=None):
        of_queries, of_keys = there(q.device)
        return ops.attention(
            q, k, v, cu_seqlens_q=of_queries, cu_seqlens_k=of_keys,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=causal, window=window,
            dropout_p=p, seed=SEED, backend=backend,
        )  # fmt: skip

    def padded(x, lengths):
        real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        real = real.to(x.device)
        return x.new_zeros(*real.shape, *x.shape[1:]).index_put((real,), x).transpose(1, 2), real

    def plain(_, q, k, v):
        (q, of_q), (k, of_k), (v, _) = (
            padded(x, lengths) for x, lengths in ((q, queries), (k, keys), (v, keys))
        )
        out = F.scaled_dot_product_attention(q, k, v, of_k[:, None, None])
        return out.transpose(1, 2)[of_q]

    # SDPA's padded form has no windows, and another dropout mask.
    has_plain = not (causal or p or window or heads.group > 1) and queries and min(keys) > 0
    product = (
        2 * heads.number * heads.width * sum(a * b for a, b in zip(queries, keys, strict=True))
    )
    state = sum(queries) * heads.number * heads.width
    return Case(
        name=name, op="attention", operands=given, run=run, plain=plain if has_plain else None,
        how="sentences padded, scaled_dot_product_attention, unpadded",
        moved=(Moved(4 * state), Moved(8 * state)), flops=(2 * product, 5 * product),
    )  # fmt: skip


def linear_cross_entropy(
    name: str, rows: Rows, vocabulary: int, *, smoothing: float = 0.1, reduction: str = "mean",
    bias: bool = False, chunk: int | None = None,
) -> Case:  # fmt: skip
    """Every fifth target is ignored."""
    target = torch.randint(vocabulary, rows.lead)
    target[1::5] = -100
    there = on_devices(target)
    given: dict = {"hidden": rows.random(), "weight": linear(vocabulary, rows.dim)}
    given |= {"bias": Stored(torch.randn(vocabulary))} if bias else {}

    def run(hidden, weight, bias=None, *, backend=None):
        return ops.linear_cross_entropy(
            hidden, weight, there(hidden.device)[0], bias=bias, label_smoothing=smoothing,
            reduction=reduction, chunk=chunk, backend=backend,
        )  # fmt: skip

    def plain(_, hidden, weight, bias=None):
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            logits.flatten(0, -2), there(hidden.device)[0].flatten(), label_smoothing=smoothing,
            reduction=reduction,
        )  # fmt: skip

    product = 2 * rows.tokens * rows.dim * vocabulary
    return Case(
        name=name, op="linear_cross_entropy", operands=given, run=run, plain=plain,
        # Gradients are made in forward.
        how=f"linear to {vocabulary:,} words, cross_entropy", flops=(3 * product, 0),
    )  # fmt: skip


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
    name: str, steps: int, batch: int, width: int, *, reverse: bool = False, begun: bool = False
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

    product = 2 * steps * batch * width * 4 * width
    return Case(
        name=name, op="peephole_lstm", operands=given, run=run,
        plain=lambda _, **named: loop_of_ops(**named, **options(named["f"])),
        how=f"a loop of ops over {steps} steps", flops=(product, 2 * product),
    )  # fmt: skip


rms_norm = partial(layer_norm, rms=True)
