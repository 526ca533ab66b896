"""Makes calls of the public ops over rows, with random operands, from their sizes and options."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.cases import case
from deepfast.cases.case import Calls, Case, Computed, Moved, Rows, Sizes, Stored, gains, values
from deepfast.ops.depth_mix import depth_mix_sums as sums_of

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
    name: str, rows: Rows, *, rms=False, residual=True, p=0.0, weight=True, bias=True
) -> Case:
    """LN or RMS norm of residual + dropout(x); without ``residual`` of x."""
    given: dict = {"x": rows.random()}
    if residual:
        given["residual"] = rows.random()
    given |= _norm_parameters(rows.dim, rms, weight, bias)

    def run(x, residual=None, weight=None, bias=None, *, backend=None):
        norm = (weight,) if rms else (weight, bias)
        if residual is None:
            return (ops.rms_norm if rms else ops.layer_norm)(x, *norm, backend=backend)
        add_norm = ops.add_rms_norm if rms else ops.add_layer_norm
        return add_norm(x, residual, *norm, dropout_p=p, training=True, seed=SEED, backend=backend)

    def plain(drop, x, residual=None, weight=None, bias=None):
        s = _summed(drop, p, x, residual)
        y = _norm(s, weight, bias, rms=rms)
        return y if residual is None else (y, s)

    kind = "rms_norm" if rms else "layer_norm"
    how = f"dropout, add, {kind}" if residual else kind
    state, states, statistics = rows.tokens * rows.dim, 1 + residual, 2 * rows.tokens
    moved = Moved(2 * states * state, statistics), Moved((1 + 2 * states) * state, statistics)
    return Case(name, "layer_norm", given, run, plain, how, moved)


def activation(name: str, rows: Rows, kind: str = "gelu", *, p=0.0, bias=True) -> Case:
    given: dict = {"h": rows.random()} | ({"bias": values(rows.dim)} if bias else {})

    def run(h, bias=None, *, backend=None):
        options = {"dropout_p": p, "training": True, "seed": SEED, "backend": backend}
        return ops.activation(h, kind, bias=bias, **options)

    def plain(drop, h, bias=None):
        a = getattr(F, kind)(h if bias is None else h + bias)
        return drop(a, p, SEED) if p else a

    state = rows.tokens * rows.dim
    moved = Moved(2 * state), Moved(3 * state)
    return Case(name, "activation", given, run, plain, f"add, {kind}, dropout", moved)


def _of_norm(rows: Rows, rms: bool, residual: bool) -> dict:
    """The operands of an op that begins with a norm."""
    given = {"x": rows.random()} | ({"residual": rows.random()} if residual else {})
    norm = _norm_parameters(rows.dim, rms)
    return given | {f"norm_{name}": parameter for name, parameter in norm.items()}


def norm_linear(
    name: str, rows: Rows, outputs: int = 7, *, rms=False, residual=True, p=0.0
) -> Case:
    given = _of_norm(rows, rms, residual)
    given |= {"weight": case.linear(outputs, rows.dim), "bias": Stored(torch.randn(outputs))}

    def run(x, norm_weight, weight, bias, residual=None, norm_bias=None, *, backend=None):
        parameters = norm_weight, norm_bias, weight, bias, RMS_EPS if rms else EPS
        options = {"norm_type": "rms" if rms else "layer", "backend": backend}
        if residual is None:
            return ops.norm_linear(x, *parameters, **options)
        options |= {"dropout_p": p, "training": True, "seed": SEED}
        return ops.add_norm_linear(x, residual, *parameters, **options)

    def plain(drop, x, norm_weight, weight, bias, residual=None, norm_bias=None):
        s = _summed(drop, p, x, residual)
        out = F.linear(_norm(s, norm_weight, norm_bias, rms=rms), weight, bias)
        return out if residual is None else (out, s)

    product = 2 * rows.tokens * rows.dim * outputs
    how = f"{'rms' if rms else 'layer'}_norm, linear"
    return Case(name, "layer_norm", given, run, plain, how, flops=(product, 2 * product))


def feed_forward(
    name: str, rows: Rows, width: int = 7, kind: str = "gelu", *, rms=False, residual=True, p=0.0
) -> Case:
    given = _of_norm(rows, rms, residual)
    given |= {"up_weight": case.linear(width, rows.dim), "up_bias": values(width)}
    given |= {"down_weight": case.linear(rows.dim, width)}
    given |= {"down_bias": Stored(torch.randn(rows.dim))}
    norm = {"norm_type": "rms" if rms else "layer", "eps": RMS_EPS if rms else EPS}
    dropout = {"dropout_p": p if residual else 0.0, "seed": SEED, "training": True}
    hidden = {"activation": kind, "activation_dropout_p": p, "activation_seed": SEED + 1}

    def run(x, norm_weight, residual=None, norm_bias=None, *, backend=None, **linears):
        options = norm | dropout | hidden | {"backend": backend}
        return ops.feed_forward(x, norm_weight, norm_bias, **linears, residual=residual, **options)

    def plain(drop, x, norm_weight, residual=None, norm_bias=None, **linears):
        s = x if residual is None else _summed(drop, p, x, residual)
        n = _norm(s, norm_weight, norm_bias, rms=rms)
        h = getattr(F, kind)(F.linear(n, linears["up_weight"], linears["up_bias"]))
        h = drop(h, p, SEED + 1) if p else h
        return F.linear(h, linears["down_weight"], linears["down_bias"]), s

    how = f"{norm['norm_type']}_norm, linear, {kind}, dropout, linear"
    product = 4 * rows.tokens * rows.dim * width
    return Case(name, "layer_norm", given, run, plain, how, flops=(product, 2 * product))


# ---- over depth ----------------------------------------------------------------------------------


def _sources(rows: Rows, count: int) -> dict:
    """Tensors ``x0``, ``x1`` and so on; every other one lies an element further."""
    return {f"x{k}": rows._replace(offset=rows.offset * (k % 2)).random() for k in range(count)}


def depth_mix(
    name: str, rows: Rows, count: int, *, norm: Sequence[str] = ("weight", "bias"), channels=False
) -> Case:
    """``norm``: which parameters the sources' LN has; empty without LN. ``channels``: weights per
    channel."""
    dim = rows.dim
    given = _sources(rows, count)
    given["weight"] = values(count, dim) if channels else values(count)
    made = {"weight": gains, "bias": values}
    given |= {f"norm_{part}": made[part](count, dim) for part in norm}

    def run(weight, norm_weight=None, norm_bias=None, *, backend=None, **sources):
        options = {"norm_weight": norm_weight, "norm_bias": norm_bias, "backend": backend}
        return ops.depth_mix(list(sources.values()), weight, **options)

    def plain(_, weight, norm_weight=None, norm_bias=None, **sources):
        x = None
        for k, source in enumerate(sources.values()):
            parts = (None if part is None else part[k] for part in (norm_weight, norm_bias))
            z = _norm(source, *parts) if norm else source
            x = weight[k] * z if x is None else torch.addcmul(x, weight[k].to(z.dtype), z)
        return x

    state, product = rows.tokens * dim, 2 * count * rows.tokens * dim
    statistics = 2 * count * rows.tokens if norm else 0
    moved = Moved((count + 1) * state, statistics), Moved((2 * count + 1) * state, statistics)
    how = f"a loop of {'layer_norm and ' if norm else ''}addcmul over {count} layers"
    return Case(name, "depth_mix", given, run, plain, how, moved, (product, 2 * product))


def depth_mix_sums(name: str, rows: Rows, count: int, sums: int = 2) -> Case:
    """Several sums of the same sources, as a traced block of rows computes them."""
    given = _sources(rows, count) | {"weight": values(count, sums)}

    def run(weight, *, backend=None, **sources):
        return sums_of(list(sources.values()), weight, backend)

    def plain(_, weight, **sources):
        return weight.mT @ torch.stack(list(sources.values()), -2)

    product = 2 * sums * count * rows.tokens * rows.dim
    flops, how = (product, 2 * product), "stack, matmul"
    return Case(name, "depth_attention", given, run, plain, how, flops=flops)


def attend(sources, query=None, scores=None, norm_weight=None, *, norm=True, lse=True):
    """Stack, normalise, score, softmax, sum: the published form of attention over depth."""
    v = torch.stack(list(sources), -2)
    if scores is None:
        q = query if norm_weight is None else query * norm_weight
        n = F.rms_norm(v, v.shape[-1:], eps=RMS_EPS) if norm else v
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
    name: str, rows: Rows, count: int, hops=1, *, scored=False, norm=True, gain=True, lse=True
) -> Case:
    """Attention by ``hops`` queries, or, with None, by one without an axis. ``scored``: by given
    scores. ``gain``: whether the norm has one; "apart" for one of each hop."""
    many = () if hops is None else (hops,)
    given = _sources(rows, count)
    if scored:
        given["scores"] = values(*rows.lead, count, *many)
    else:
        given["query"] = Computed(torch.randn(*many, rows.dim) / rows.dim**0.5)
        if gain:
            given["norm_weight"] = gains(*(many if gain == "apart" else ()), rows.dim)

    def run(query=None, scores=None, norm_weight=None, *, backend=None, **sources):
        options = {"norm_type": "rms" if norm else None, "norm_weight": norm_weight}
        options |= {"return_lse": lse, "backend": backend}
        return ops.depth_attention(list(sources.values()), query, scores=scores, **options)

    def plain(_, query=None, scores=None, norm_weight=None, **sources):
        return attend(sources.values(), query, scores, norm_weight, norm=norm, lse=lse)

    state, results = rows.tokens * rows.dim, hops or 1
    # The scores and the sum.
    product = (1 if scored else 2) * 2 * results * count * state
    moved = Moved((count + results) * state), Moved((2 * count + 2 * results) * state)
    how = f"a stack of {count} layers, rms_norm, softmax, sum"
    return Case(name, "depth_attention", given, run, plain, how, moved, (product, 2 * product))


def attention_residual(name: str, rows: Rows, count: int) -> Case:
    def run(query, *, backend=None, **sources):
        return ops.attention_residual(query, list(sources.values()), backend=backend)

    return replace(depth_attention(name, rows, count, None, gain=False, lse=False), run=run)


rms_norm = partial(layer_norm, rms=True)


# ---- what kernels must pass ----------------------------------------------------------------------


def layer_norm_calls(s: Sizes) -> Iterator[Case]:
    for name, rows in s.four():
        yield layer_norm(f"{name}, residual, dropout", rows, p=0.3)
        yield rms_norm(f"RMS norm, {name}", rows, p=0.3)
    batch = Rows((2, 3), s.odd, apart=5)
    yield layer_norm("alone, in a batch", batch, residual=False, weight=False, bias=False)
    yield rms_norm("RMS norm, alone", s.rows(s.even), residual=False, weight=False)


def activation_calls(s: Sizes) -> Iterator[Case]:
    for kind in ("relu", "gelu"):
        for name, rows in s.four():
            # The bias comes with dropout, so that each is also left out.
            p = 0.0 if name == "aligned" else 0.3
            yield activation(f"{kind}, {name}", rows, kind, p=p, bias=p > 0)


def norm_linear_calls(s: Sizes) -> Iterator[Case]:
    for name, rows in s.four():
        yield norm_linear(name, rows, 11, p=0.3)
    yield norm_linear("RMS norm", s.rows(s.odd), 11, rms=True, p=0.3)
    yield norm_linear("alone", s.rows(s.odd), 11, residual=False)


def feed_forward_calls(s: Sizes) -> Iterator[Case]:
    for kind in ("relu", "gelu"):
        for name, rows in s.four():
            p = 0.0 if name == "aligned" else 0.3
            yield feed_forward(f"{kind}, {name}", rows, 21, kind, p=p)
    yield feed_forward("RMS norm", s.rows(s.odd), 21, rms=True, p=0.3)
    yield feed_forward("without residual", s.rows(s.odd), 21, residual=False)


def depth_mix_calls(s: Sizes) -> Iterator[Case]:
    few, misfit = 7, s.rows(s.misfit, tokens=7)
    for name, rows in s.four():
        yield depth_mix(name, rows, 5)
    yield depth_mix("weight per channel, no norm", misfit, 3, norm=(), channels=True)
    alone = ("weight",)
    yield depth_mix("weight per channel, LN without bias", misfit, 3, norm=alone, channels=True)
    yield depth_mix("LN without weight", misfit, 2, norm=("bias",))
    yield depth_mix("no norm", misfit, 2, norm=())
    yield depth_mix("many sources", s.rows(s.misfit, 1, 1, few), s.many)


def depth_attention_calls(s: Sizes) -> Iterator[Case]:
    for (name, rows), hops in zip(s.four(), (1, 4, None, 1), strict=True):
        yield depth_attention(f"{name}, {hops or 'no'} hops", rows, 7, hops)
    yield depth_attention("without a gain", s.rows(s.odd), 3, None, gain=False)
    yield depth_attention("a gain for each hop", s.rows(s.odd), 3, 2, gain="apart")
    for hops in (None, 3):
        name, given = f"no norm, {hops or 'no'} hops", {"norm": False, "gain": False}
        yield depth_attention(name, s.rows(s.odd), 7, hops, **given)
    for hops in (None, 2):
        name = f"scores, {hops or 'no'} hops"
        yield depth_attention(name, s.rows(s.misfit), 5, hops, scored=True)
    yield depth_attention("many sources", s.rows(s.misfit, tokens=7), s.many, 2)
    # Several sums of the same sources have the same kernels, without a softmax.
    for sums in (1, 4):
        yield depth_mix_sums(f"given weights, {sums} sums", s.rows(s.misfit), 5, sums)
    yield depth_mix_sums("given weights, many sources", s.rows(s.odd, 3), s.many, 3)


KERNELS = {
    "layer_norm": Calls(layer_norm_calls, lambda t: layer_norm(t.name, t.rows, p=0.1)),
    "activation": Calls(
        activation_calls, lambda t: activation(t.name, t.rows, "relu", p=0.1, bias=False)
    ),
    "depth_mix": Calls(depth_mix_calls, lambda t: depth_mix(t.name, t.rows, 8)),
    "depth_attention": Calls(
        depth_attention_calls, lambda t: depth_attention(t.name, t.rows, 8, gain=False)
    ),
}

PRODUCTS = {"norm_linear": norm_linear_calls, "feed_forward": feed_forward_calls}
"""Ops that combine such kernels with torch's matrix products."""
