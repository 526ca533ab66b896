"""GPU benchmark of attention over packed sentences."""

import math
from itertools import accumulate

import torch

from bench.gpu import peers
from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, random
from deepfast import backend, ops


def sentence_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Random lengths that add up to ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
        lengths.append(min(drawn, left))
    return lengths


def attention(bench: Bench) -> None:
    bench.attempt(_attention)


def _attention(bench: Bench) -> None:
    """Sentences of 20 to 60 tokens: packed, and for SDPA padded to the longest."""
    tokens, heads, width = bench.size((8192, 8, 64), (40, 2, 16))
    lengths = sentence_lengths(tokens, *bench.size((20, 60), (5, 12)))
    longest, state = max(lengths), 2 * tokens * heads * width
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=bench.device)
    count = bench.sets(8 * state)
    # Slices of one projection, as a layer passes them.
    packed = [
        [x.detach().requires_grad_() for x in random(bench, tokens, 3, heads, width).unbind(1)]
        for _ in range(count)
    ]
    dpacked = [random(bench, tokens, heads, width) for _ in range(count)]
    shape = len(lengths), heads, longest, width
    padded = [[random(bench, *shape, grad=True) for _ in range(3)] for _ in range(count)]
    dpadded = [random(bench, *shape) for _ in range(count)]
    real = torch.arange(longest, device=bench.device) < cu.diff()[:, None]

    def ours(q, k, v):
        return ops.attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
            backend="triton",
        )  # fmt: skip

    def varlen(q, k, v):
        return peers.varlen_attention(q, k, v, cu, longest)

    def sdpa(q, k, v):
        return peers.padded_attention(q, k, v, real[:, None, None, :])

    def maker(apply, operands, grads, training):
        def both():
            return [
                torch.autograd.grad(apply(*xs), xs, g) if training else apply(*xs)
                for xs, g in zip(operands, grads, strict=True)
            ]

        moved = (12 if training else 4) * state
        return lambda: Variant(run=both, calls=count, nbytes=moved)

    size = f"{tokens} tokens in {len(lengths)} sentences, {heads} heads of {width}, bf16"
    for training in (False, True):
        forms = {
            "deepfast": maker(ours, packed, dpacked, training),
            "SDPA, padded": maker(sdpa, padded, dpadded, training),
        }
        reason = backend.refusal("attention", "varlen", bench.device, BF16)
        if reason is None:
            forms["torch varlen"] = maker(varlen, packed, dpacked, training)
        else:
            bench.note(f"no torch varlen: {reason}")
        what = f"attention {'forward + backward' if training else 'forward'}, {size}"
        timings = bench.case(what, forms)
    fast = timings.pop("deepfast", None)
    best = min((t.median for t in timings.values()), default=math.nan)
    reached = best / fast.median if fast and timings else None
    bench.target(f"{what}, times the best of SDPA and varlen", reached, 1.5)
