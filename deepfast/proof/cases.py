"""What a backend is held to before it becomes a default: small random calls of every public op."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.func import functional_call

from deepfast import ops
from deepfast.depth.history import DepthHistory
from deepfast.nn import DLCL, AttentionResiduals, LayerNorm, RMSNorm
from deepfast.proof.check import Case, Computed, Stored
from deepfast.proof.table import widths


@dataclass(frozen=True)
class Sizes:
    """Tokens, and numbers of channels: odd, a multiple of 16 bytes, and neither."""

    tokens: int
    odd: int
    even: int
    misfit: int
    many: int = 35
    """Sources, more than the 32 that some kernels take at once."""


# Enough tokens that a multiprocessor gets several rows; without a GPU as few as possible.
QUICK = {"cuda": Sizes(1023, 255, 512, 100), "cpu": Sizes(5, 17, 32, 20)}
THOROUGH = {
    "cuda": (Sizes(1, 1, 8, 36), Sizes(8191, 1023, 4096, 1000, 70)),
    "cpu": (Sizes(1, 1, 8, 36),),
}


def _rows(*shape: int, apart: int = 0, offset: int = 0) -> Stored:
    return Stored(torch.randn(shape), apart, offset)


def _gains(*shape: int) -> Computed:
    return Computed(1 + 0.3 * torch.randn(shape))


def _values(*shape: int) -> Computed:
    return Computed(torch.randn(shape))


def _layer_norm(s: Sizes) -> Iterator[Case]:
    fused = functools.partial(ops.layer_norm, dropout_p=0.3, training=True, seed=5)
    rms = functools.partial(ops.rms_norm, dropout_p=0.3, training=True, seed=5)
    plain = functools.partial(ops.layer_norm, weight=None, bias=None)
    for name, T, D, apart, offset in (
        ("odd width, rows apart", s.tokens, s.odd, 3, 0),
        ("aligned", s.tokens, s.even, 0, 0),
        ("rows off 16 bytes", s.tokens, s.misfit, 0, 1),
        ("no token", 0, s.even, 0, 0),
    ):
        x, residual = (_rows(T, D, apart=apart, offset=offset) for _ in range(2))
        norm = {"weight": _gains(D), "bias": _values(D)}
        yield Case(f"{name}, residual, dropout", {"x": x, "residual": residual, **norm}, fused)
        del norm["bias"]
        yield Case(f"RMS norm, {name}", {"x": x, "residual": residual, **norm}, rms)
    yield Case("alone, in a batch", {"x": _rows(2, 3, s.odd, apart=5)}, plain)
    yield Case("RMS norm, alone", {"x": _rows(s.tokens, s.even)}, ops.rms_norm)


def _activation(s: Sizes) -> Iterator[Case]:
    for kind in ("relu", "gelu"):
        for name, T, D, p in (
            ("odd width, rows apart", s.tokens, s.odd, 0.3),
            ("aligned", s.tokens, s.even, 0.0),
            ("no token", 0, s.even, 0.3),
        ):
            function = functools.partial(
                ops.activation, kind=kind, dropout_p=p, training=True, seed=5
            )
            given: dict = {"h": _rows(T, D, apart=3 * (D % 2), offset=D % 2)}
            # The bias comes with dropout, so that each is also left out.
            if p:
                given["bias"] = _values(D)
            yield Case(f"{kind}, {name}", given, function)


def _mix(weight, norm_weight=None, norm_bias=None, *, backend, **sources):
    return ops.depth_mix(
        list(sources.values()), weight, norm_weight=norm_weight, norm_bias=norm_bias,
        backend=backend,
    )  # fmt: skip


def _depth_mix(s: Sizes) -> Iterator[Case]:
    for name, count, T, D, apart, normed, channels in (
        ("odd width, rows apart", 5, s.tokens, s.odd, 3, True, ()),
        ("aligned", 5, s.tokens, s.even, 0, True, ()),
        ("weight per channel, no norm", 3, 7, s.misfit, 0, False, (s.misfit,)),
        ("many sources", s.many, 7, s.misfit, 1, True, ()),
        ("no token", 3, 0, s.even, 0, True, ()),
    ):
        given: dict = {f"x{k}": _rows(T, D, apart=apart, offset=k % 2) for k in range(count)}
        given["weight"] = _values(count, *channels)
        if normed:
            given |= {"norm_weight": _gains(count, D), "norm_bias": _values(count, D)}
        yield Case(name, given, _mix)


def _mix_tokens(backend, weight, **sources):
    return ops.depth_mix(list(sources.values()), weight, backend=backend)


def _attend(backend, query=None, scores=None, norm_weight=None, **sources):
    return ops.depth_attention(
        list(sources.values()), query, scores=scores, norm_weight=norm_weight, return_lse=True,
        backend=backend,
    )  # fmt: skip


def _depth_attention(s: Sizes) -> Iterator[Case]:
    for name, count, T, D, hops in (
        ("odd width, rows apart", 7, s.tokens, s.odd, 1),
        ("aligned, hops", 7, s.tokens, s.even, 4),
        ("scores", 5, s.tokens, s.misfit, 0),
        ("many sources", s.many, 7, s.misfit, 2),
        ("no token", 3, 0, s.even, 1),
    ):
        given: dict = {f"x{k}": _rows(T, D, apart=3 * (D % 2)) for k in range(count)}
        if hops:
            query = Computed(torch.randn(hops, D) / D**0.5)
            given |= {"query": query, "norm_weight": _gains(D)}
        else:
            given["scores"] = _values(T, count, 2)
        yield Case(name, given, _attend)
    # Weights of each token have the same kernels, without a softmax.
    given = {f"x{k}": _rows(s.tokens, s.misfit) for k in range(5)}
    yield Case("weights of each token", given | {"weight": _values(s.tokens, 5, 4)}, _mix_tokens)


class _Stack(torch.nn.Module):
    """Boundaries whose layers add a given tensor to 1/64 of their input, so that the error of one
    boundary is not hidden by the errors of those before it."""

    def __init__(self, connection: torch.nn.Module, dim: int, full: bool, rms: bool):
        super().__init__()
        self.connection, self.full = connection, full
        self.norm = RMSNorm(dim) if rms else LayerNorm(dim)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        history, x, residual = DepthHistory(), None, None
        results = []
        for k, y in enumerate(given):
            branch = y if x is None else y + x / 64
            if self.full:
                residual, x = self.connection(
                    branch, history, residual=residual, dropout_p=0.3, seed=k,
                    out_norm=self.norm.as_output(),
                )  # fmt: skip
            else:
                x = self.connection(branch, history)
            results.append(x)
        return tuple(results)


def _push(kind, depth: int, dim: int, full: bool, options: dict, *, backend: str, **given: Tensor):
    states = [given.pop(f"y{k}") for k in range(depth + 1)]
    rms = options.get("norm_kind") == "rms"
    connection = kind(depth, dim, backend=backend, **options)
    stack = _Stack(connection, dim, full, rms).to(states[0].device)
    return functional_call(
        stack, {n.replace("__", "."): p for n, p in given.items()}, tuple(states)
    )


def _pushed(name: str, kind, T: int, D: int, depth: int, full: bool, options: dict, **parameters):
    """A call of a connection with these ``parameters``."""
    given: dict = {f"y{k}": _rows(T, D) for k in range(depth + 1)}
    given |= {f"connection__{n}": p for n, p in parameters.items()}
    if full:
        given["norm__weight"] = _gains(D)
        if options.get("norm_kind") != "rms":
            given["norm__bias"] = _values(D)
    return Case(name, given, functools.partial(_push, kind, depth, D, full, options))


def _stack(name: str, T: int, D: int, depth: int = 6, full: bool = False, **options) -> Case:
    rows = depth + 1
    channels = (D,) if options.get("weight") == "vector" else ()
    parameters = {"weight": Computed(torch.randn(rows, rows, *channels) / rows**0.5)}
    if options.get("norm", "pre") is not None:
        parameters["norm_weight"] = _gains(rows, D)
        if options.get("norm_kind") != "rms":
            parameters["norm_bias"] = _values(rows, D)
    return _pushed(name, DLCL, T, D, depth, full, options, **parameters)


def _residuals(name: str, T: int, D: int, depth: int = 6, full: bool = False, **options) -> Case:
    rows = depth + 1
    parameters = {"query": Computed(torch.randn(rows, D) / D**0.5)}
    if options.get("weights") == "relu":
        parameters["bias"] = _values(rows, rows)
    return _pushed(name, AttentionResiduals, T, D, depth, full, options, **parameters)


def _boundary(s: Sizes) -> Iterator[Case]:
    yield _stack("odd width, residual, dropout, next norm", s.tokens, s.odd, full=True)
    yield _stack("aligned, residual, dropout, next norm", s.tokens, s.even, full=True)
    yield _stack("odd width, RMS norms", s.tokens, s.odd, full=True, norm_kind="rms")
    yield _stack("post-norm", s.tokens, s.misfit, norm="post")
    yield _stack("weight per channel, no norm", 7, s.odd, weight="vector", norm=None)
    yield _stack("window", 7, s.even, window=3)
    yield _stack("many sources", 7, s.misfit, depth=s.many)
    yield _stack("no token", 0, s.even, full=True)


def _attention_boundary(s: Sizes) -> Iterator[Case]:
    yield _residuals("odd width, residual, dropout, next norm", s.tokens, s.odd, full=True)
    yield _residuals("aligned, residual, dropout, next norm", s.tokens, s.even, full=True)
    yield _residuals("relu", s.tokens, s.misfit, weights="relu")
    yield _residuals("blocks", 7, s.even, block=2)
    yield _residuals("window", 7, s.odd, window=3)
    yield _residuals("many sources", 7, s.misfit, depth=s.many)
    yield _residuals("no token", 0, s.even, full=True)


def offsets(lengths: list[int], device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _sentences(queries: list[int], keys: list[int], causal: bool, p: float, q, k, v, backend):
    return ops.attention(
        q, k, v, cu_seqlens_q=offsets(queries, q.device), cu_seqlens_k=offsets(keys, q.device),
        max_seqlen_q=max(queries, default=0), max_seqlen_k=max(keys, default=0), causal=causal,
        dropout_p=p, seed=5, backend=backend,
    )  # fmt: skip


def _heads(name: str, queries: list[int], keys: list[int], heads: int, width: int, causal, p):
    given: dict
    tokens = {"q": sum(queries), "k": sum(keys), "v": sum(keys)}
    given = {n: _rows(t, heads, width, apart=8) for n, t in tokens.items()}
    return Case(name, given, functools.partial(_sentences, queries, keys, causal, p))


def _attention(s: Sizes) -> Iterator[Case]:
    short = [1, 9, 0, min(s.tokens, 61), 5]
    long = [s.tokens // 2 + 1, 3]
    yield _heads("short, causal, dropout", short, short, 2, 32, True, 0.3)
    yield _heads("long", long, long, 2, 16, False, 0.0)
    yield _heads("cross", [7, 3, 0, 5], [s.tokens // 8 + 3, 1, 9, 0], 3, 8, False, 0.1)
    yield _heads("odd width", [9, 2], [9, 2], 1, 40 if s.tokens > 5 else 10, True, 0.1)
    yield _heads("no sentence", [], [], 2, 16, False, 0.0)


def _losses(target: Tensor, options: dict, hidden, weight, backend):
    return ops.linear_cross_entropy(
        hidden, weight, target.to(hidden.device), backend=backend, **options
    )


def _linear_cross_entropy(s: Sizes) -> Iterator[Case]:
    for name, T, D, V, smoothing, apart in (
        ("odd vocabulary, ignored targets", s.tokens, s.even, 4 * s.odd + 1, 0.1, 3),
        ("aligned, no smoothing", s.tokens // 2, s.misfit, 4 * s.even, 0.0, 0),
        ("no token", 0, s.even, s.even, 0.1, 0),
    ):
        target = torch.randint(V, (T,))
        target[1::5] = -100
        given: dict = {
            "hidden": _rows(T, D, apart=apart),
            "weight": Stored(torch.randn(V, D) / D**0.5),
        }
        # The mean of no token is nan.
        options = {"label_smoothing": smoothing, "reduction": "mean" if T else "sum"}
        yield Case(name, given, functools.partial(_losses, target, options))


def _recur(lengths: Tensor | None, reverse: bool, f, weight, peephole, backend, h0=None, c0=None):
    lengths = None if lengths is None else lengths.to(f.device)
    return ops.peephole_lstm(
        f, weight, peephole, h0=h0, c0=c0, lengths=lengths, reverse=reverse, backend=backend
    )


def _lstm(name: str, T: int, B: int, H: int, reverse: bool, begun: bool) -> Case:
    given: dict = {
        "f": _rows(T, B, 4 * H), "weight": Stored(torch.randn(H, 4 * H) / H**0.5),
        "peephole": _values(3, H),
    }  # fmt: skip
    if begun:
        given |= {"h0": _rows(B, H), "c0": _values(B, H)}
    lengths = (torch.arange(B) * 7 + T) % (T + 1) if begun else None
    return Case(name, given, functools.partial(_recur, lengths, reverse))


def _peephole_lstm(s: Sizes) -> Iterator[Case]:
    B = 33 if s.tokens > 5 else 3
    yield _lstm("odd width, lengths, reversed", 5, B, s.odd, True, True)
    yield _lstm("aligned", 3, B, s.even, False, False)
    yield _lstm("no sentence", 2, 0, s.misfit, False, True)


MAKERS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "layer_norm": _layer_norm,
    "activation": _activation,
    "depth_mix": _depth_mix,
    "depth_attention": _depth_attention,
    "boundary": _boundary,
    "attention_boundary": _attention_boundary,
    "attention": _attention,
    "linear_cross_entropy": _linear_cross_entropy,
    "peephole_lstm": _peephole_lstm,
}


def wide(op: str, width: int, kind: str, tokens: int | None = None) -> Case:
    """A typical call at ``width``. By default it has as many tokens as are timed: enough that a
    kernel takes longer than its launch."""
    T = tokens or ((1 << 23) // width if kind == "cuda" else 2)
    name = f"width {width}"
    match op:
        case "boundary":
            return _stack(name, T, width, depth=8, full=True)
        case "attention_boundary":
            return _residuals(name, T, width, depth=8, full=True)
        case "depth_mix":
            given: dict = {f"x{k}": _rows(T, width) for k in range(8)}
            norms = {"norm_weight": _gains(8, width), "norm_bias": _values(8, width)}
            return Case(name, given | norms | {"weight": _values(8)}, _mix)
        case "depth_attention":
            given = {f"x{k}": _rows(T, width) for k in range(8)}
            query = Computed(torch.randn(1, width) / width**0.5)
            return Case(name, given | {"query": query}, _attend)
        case "layer_norm":
            fused = functools.partial(ops.layer_norm, dropout_p=0.1, training=True, seed=5)
            given = {"x": _rows(T, width), "residual": _rows(T, width)}
            return Case(name, given | {"weight": _gains(width), "bias": _values(width)}, fused)
        case "activation":
            relu = functools.partial(ops.activation, kind="relu", dropout_p=0.1, training=True)
            return Case(name, {"h": _rows(T, width)}, functools.partial(relu, seed=5))
        case "attention":
            lengths = [width] * max(1, (8192 if kind == "cuda" and tokens is None else 1) // width)
            # The reference holds all weights of a sentence, in float64.
            heads, dim = (2 if tokens else 8, 64) if kind == "cuda" else (1, 16)
            return _heads(name, lengths, lengths, heads, dim, False, 0.0)
        case "linear_cross_entropy":
            V, T = 8 * width, min(T, 2048)
            given = {"hidden": _rows(T, 512 if kind == "cuda" else 8)}
            given["weight"] = Stored(torch.randn(V, given["hidden"].x.shape[1]) / 16)
            options = {"label_smoothing": 0.1}
            return Case(name, given, functools.partial(_losses, torch.randint(V, (T,)), options))
        case "peephole_lstm":
            return _lstm(name, 16 if kind == "cuda" else 2, min(T, 64), width, False, False)
    raise ValueError(f"expected an op of {', '.join(MAKERS)}, got {op!r}")


def cases(op: str, kind: str, thorough: bool = False) -> Iterator[Case]:
    """The calls that backends are held to on devices of type ``kind``: odd sizes, then the typical
    widths, with fewer tokens than are timed."""
    torch.manual_seed(1)
    for sizes in (QUICK[kind], *(THOROUGH[kind] if thorough else ())):
        yield from MAKERS[op](sizes)
    for width in widths(op, kind):
        yield wide(op, width, kind, tokens=256 if kind == "cuda" else 2)
