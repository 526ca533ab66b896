"""For every registered op: a public call with its leaves, and the operator behind it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from deepfast import ops
from deepfast.backend import NO_CUDA, SDPA

T, D, K, N, SEED = 5, 16, 3, 7, 11
SMOOTHING = 0.1


class Case(NamedTuple):
    """A public call with its leaves, and the arguments of the operator behind it."""

    run: Callable
    leaves: list[torch.Tensor]
    arguments: Callable


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def cu_seqlens(tokens):
    """Two sentences, the first of two tokens."""
    return torch.tensor([0, 2, tokens], dtype=torch.int32)


def labels(tokens):
    return torch.arange(tokens) % N


RMS = {
    "rms_norm": "layer_norm",
    "norm_linear, rms": "norm_linear",
    "feed_forward, rms": "feed_forward",
}
VARIANTS = RMS | {
    "layer_norm, alone": "layer_norm", "relu": "activation",
    "depth_mix, per channel": "depth_mix", "depth_mix, no norm": "depth_mix",
}  # fmt: skip
"""Cases that share an operator with another case, and the operator's name."""


def case(name, backend, p, tokens=T, dim=D):
    """The op's case with dropout p, where it has dropout.

    tokens: their count, or the leading dimensions of x in (..., D).
    """
    kind = "relu" if name == "relu" else "gelu"
    channels = (dim,) if name == "depth_mix, per channel" else ()
    norms = () if name == "depth_mix, no norm" else ("weight", "bias")
    seed = torch.tensor(SEED) if p else None
    options = {"dropout_p": p, "seed": SEED, "backend": backend}

    def layer_norm(x, residual, w, b):
        return ops.layer_norm(x, w, b, residual=residual, training=True, **options)

    def rms_norm(x, residual, w):
        return ops.rms_norm(x, w, residual=residual, training=True, **options)

    def activation(h, bias):
        return ops.activation(h, kind, bias=bias, training=True, **options)

    def depth_mix(*leaves):
        sources, (w, *norm) = list(leaves[:K]), leaves[K:]
        nw, nb = norm or (None, None)
        return ops.depth_mix(sources, w, norm_weight=nw, norm_bias=nb, backend=backend)

    def depth_mix_tokens(*leaves):
        return ops.depth_mix(list(leaves[:K]), leaves[K], backend=backend)

    def depth_attention(*leaves):
        return ops.depth_attention(list(leaves[:K]), leaves[K], return_lse=True, backend=backend)

    rms = name.endswith(", rms")

    def norm_linear(x, residual, nw, *rest):
        nb, w, b = (None, *rest) if rms else rest
        return ops.norm_linear(
            x, nw, nb, w, b, rms=rms, residual=residual, training=True, **options
        )

    def feed_forward(x, residual, nw, *rest):
        nb, *linears = (None, *rest) if rms else rest
        return ops.feed_forward(
            x, nw, nb, *linears, rms=rms, residual=residual, training=True, activation="gelu",
            activation_dropout_p=p, activation_seed=SEED, **options,
        )  # fmt: skip

    def attention(q, k, v):
        lengths = cu_seqlens(q.shape[0])
        return ops.attention(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=q.shape[0],
            max_seqlen_k=q.shape[0], causal=True, window=1, **options,
        )  # fmt: skip

    def linear_cross_entropy(hidden, w, b):
        return ops.linear_cross_entropy(
            hidden, w, labels(hidden.shape[0]), bias=b, label_smoothing=SMOOTHING, return_nll=True,
            backend=backend,
        )  # fmt: skip

    def peephole_lstm(f, w, peephole, h0, c0):
        return ops.peephole_lstm(
            f, w, peephole, h0=h0, c0=c0, lengths=torch.arange(2) * 2, reverse=True,
            backend=backend,
        )  # fmt: skip

    norm = [leaf(dim)] if rms else [leaf(dim), leaf(dim)]
    x = (*tokens, dim) if isinstance(tokens, tuple) else (tokens, dim)
    cases = {
        "layer_norm": lambda: Case(
            layer_norm, [leaf(*x), leaf(*x), leaf(dim), leaf(dim)],
            lambda x, r, w, b: (x, r, w, b, 1e-5, False, p, seed, backend),
        ),
        "layer_norm, alone": lambda: Case(
            lambda x, w, b: ops.layer_norm(x, w, b, backend=backend),
            [leaf(*x), leaf(dim), leaf(dim)],
            lambda x, w, b: (x, None, w, b, 1e-5, False, 0.0, None, backend),
        ),
        "rms_norm": lambda: Case(
            rms_norm, [leaf(*x), leaf(*x), leaf(dim)],
            lambda x, r, w: (x, r, w, None, 1e-6, True, p, seed, backend),
        ),
        "activation": lambda: Case(
            activation, [leaf(*x), leaf(dim)], lambda h, b: (h, b, kind, p, seed, backend)
        ),
        "depth_mix": lambda: Case(
            depth_mix,
            [*(leaf(*x) for _ in range(K)), leaf(K, *channels), *(leaf(K, dim) for _ in norms)],
            lambda *t: (list(t[:K]), *t[K:], 1e-5, backend),
        ),
        "depth_mix_tokens": lambda: Case(
            depth_mix_tokens,
            [*(leaf(*x) for _ in range(K)), leaf(*x[:-1], K, 2)],
            lambda *t: (list(t[:K]), t[K], backend),
        ),
        "depth_attention": lambda: Case(
            depth_attention, [*(leaf(*x) for _ in range(K)), leaf(2, dim)],
            lambda *t: (list(t[:K]), t[K], None, True, 1e-6, backend),
        ),
        "norm_linear": lambda: Case(
            norm_linear, [leaf(*x), leaf(*x), *norm, leaf(N, dim), leaf(N)],
            lambda *t: (*_with_bias(t, rms), 1e-5, rms, p, seed, backend),
        ),
        "feed_forward": lambda: Case(
            feed_forward,
            [leaf(*x), leaf(*x), *norm, leaf(N, dim), leaf(N), leaf(dim, N), leaf(dim)],
            lambda *t: (
                *_with_bias(t, rms), 1e-5, rms, p, seed, "gelu", p, seed, True, False, backend,
            ),
        ),
        "attention": lambda: Case(
            # Two heads share one of the keys.
            attention, [leaf(tokens, heads, dim) for heads in (2, 1, 1)],
            lambda q, k, v: (
                q, k, v, cu_seqlens(len(q)), cu_seqlens(len(q)), len(q), len(q), 1, 0, dim**-0.5, p,
                seed, backend,
            ),
        ),
        "linear_cross_entropy": lambda: Case(
            linear_cross_entropy, [leaf(*x), leaf(N, dim), leaf(N)],
            lambda h, w, b: (
                h, w, b, labels(len(h)), SMOOTHING, -100, True, None, h.requires_grad,
                w.requires_grad, b.requires_grad, False, backend,
            ),
        ),
        "peephole_lstm": lambda: Case(
            peephole_lstm,
            [leaf(tokens, 2, 4 * K), leaf(K, 4 * K), leaf(3, K), leaf(2, K), leaf(2, K)],
            lambda f, *rest: (f, *rest, torch.arange(2) * 2, True, f.requires_grad, backend),
        ),
    }  # fmt: skip
    return cases[name if name in cases else VARIANTS[name]]()


def _with_bias(leaves, rms):
    """Operands in the operator's order; an RMS norm has no bias."""
    return (*leaves[:3], None, *leaves[3:]) if rms else leaves


def outputs(out):
    return out if isinstance(out, tuple) else (out,)


def results(run, leaves, wanted=None):
    """Outputs of a call, and the gradients of a loss over all of them, of the leaves ``wanted``."""
    out = outputs(run(*leaves))
    loss = sum((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in out)
    return [o.detach() for o in out] + list(torch.autograd.grad(loss, wanted or leaves))


def operator(name):
    """The operator behind a case."""
    return getattr(torch.ops.deepfast, VARIANTS.get(name, name)).default


NAMES = [
    "layer_norm", "activation", "depth_mix", "depth_mix_tokens", "depth_attention", "norm_linear",
    "feed_forward", "attention", "linear_cross_entropy", "peephole_lstm",
]  # fmt: skip
DROPOUT = [0.0, 0.3]


def serves(name, backend):
    """On the CPU attention is torch's, registered by torch; some ops have no CUDA kernel."""
    if VARIANTS.get(name, name) in (*NO_CUDA, "depth_mix_tokens") and backend == "cuda":
        pytest.skip(f"{name} has no CUDA kernel")
    if name == "attention" and backend in SDPA:
        pytest.skip(f"attention by {backend} is torch's")
