"""GPU benchmark of attention over packed sentences."""

import math
from itertools import accumulate

import torch

from bench.gpu import peers
from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, ours, random
from deepfast import backend, ops


def sentence_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Random lengths that add up to ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
        lengths.append(min(drawn, left))
    return lengths


class Packed:
    """Sentences of 20 to 60 tokens: packed, and for SDPA padded to the longest."""

    def __init__(self, bench: Bench):
        tokens, heads, width = bench.size((8192, 8, 64), (16, 1, 16))
        lengths = sentence_lengths(tokens, *bench.size((20, 60), (5, 9)))
        self.longest, self.state = max(lengths), 2 * tokens * heads * width
        self.size = f"{tokens} tokens in {len(lengths)} sentences, {heads} heads of {width}, bf16"
        cu = [0, *accumulate(lengths)]
        self.cu = torch.tensor(cu, dtype=torch.int32, device=bench.device)
        count = bench.sets(8 * self.state)
        # Slices of one projection, as a layer passes them.
        self.packed = [
            [x.detach().requires_grad_() for x in random(bench, tokens, 3, heads, width).unbind(1)]
            for _ in range(count)
        ]
        self.dpacked = [random(bench, tokens, heads, width) for _ in range(count)]
        shape = len(lengths), heads, self.longest, width
        self.padded = [[random(bench, *shape, grad=True) for _ in range(3)] for _ in range(count)]
        self.dpadded = [random(bench, *shape) for _ in range(count)]
        real = torch.arange(self.longest, device=bench.device) < self.cu.diff()[:, None]
        self.mask = real[:, None, None, :]

    def ours(self, q, k, v):
        return ops.attention(
            q, k, v, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, max_seqlen_q=self.longest,
            max_seqlen_k=self.longest, backend="triton",
        )  # fmt: skip

    def varlen(self, q, k, v):
        return peers.varlen_attention(q, k, v, self.cu, self.longest)

    def sdpa(self, q, k, v):
        return peers.padded_attention(q, k, v, self.mask)

    def maker(self, apply, operands, grads, training: bool):
        def both():
            return [
                torch.autograd.grad(apply(*xs), xs, g) if training else apply(*xs)
                for xs, g in zip(operands, grads, strict=True)
            ]

        moved = (12 if training else 4) * self.state
        return lambda: Variant(run=both, calls=len(operands), nbytes=moved)


def attention(bench: Bench) -> None:
    bench.attempt(_attention)


def _attention(bench: Bench) -> None:
    case = Packed(bench)
    for training in (False, True):
        forms = {
            ours("triton"): case.maker(case.ours, case.packed, case.dpacked, training),
            "SDPA, padded": case.maker(case.sdpa, case.padded, case.dpadded, training),
        }
        reason = backend.refusal("attention", "varlen", bench.device, BF16)
        if reason is None:
            forms["torch varlen"] = case.maker(case.varlen, case.packed, case.dpacked, training)
        elif not training:
            bench.note(f"no torch varlen: {reason}")
        what = f"attention {'forward + backward' if training else 'forward'}, {case.size}"
        timings = bench.case(what, forms)
    fast = timings.pop(ours("triton"), None)
    best = min((t.median for t in timings.values()), default=math.nan)
    reached = best / fast.median if fast and timings else None
    bench.target(f"{what}, times the best of SDPA and varlen", reached, 1.5)
