"""Packed attention on a CPU beside torch's SDPA, forward and backward, by CPU time.

    python -m bench.attention --threads 1

SDPA works on padded copies of sentences of different length. Both take turns; a ratio is SDPA's
time over deepfast's, the median over the rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.encoder import DEVIATION, MEAN, lengths, parse
from deepfast import ops
from deepfast.clock import on_cpu
from deepfast.machine import cpu_model
from deepfast.measure.clock import interleave, ratio

RAGGED = f"64 x {MEAN} +- {DEVIATION}"
CASES = {RAGGED: None, "64 x 32": [32] * 64, "8 x 128": [128] * 8, "4 x 512": [512] * 4,
         "1 x 2048": [2048]}  # fmt: skip
KINDS = {
    "float32": {}, "float32, dropout 0.1": {"dropout_p": 0.1}, "float32, causal": {"causal": True},
    "bfloat16": {"dtype": torch.bfloat16},
}  # fmt: skip
HEADS = 4


def step(
    words: torch.Tensor, width: int, dtype: torch.dtype, backend: str, **options
) -> Callable[[], None]:
    """Forward and backward of sentences with this many words."""
    ends = words.cumsum(0).to(torch.int32)
    begins, longest = torch.nn.functional.pad(ends, (1, 0)), int(words.max())
    qkv = torch.randn(int(ends[-1]), 3, HEADS, width).to(dtype).requires_grad_()
    grad = torch.randn(qkv[:, 0].shape).to(dtype)
    sizes = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": longest,
             "max_seqlen_k": longest}  # fmt: skip

    def run() -> None:
        o = ops.attention(*qkv.unbind(1), **sizes, backend=backend, **options)
        torch.autograd.grad(o, qkv, grad)

    return run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=64, help="channels of a head")
    args = parse(parser, argv, rounds=7)
    threads = torch.get_num_threads()
    print(f"{HEADS} heads of {args.width} channels, {cpu_model()}, {threads} threads, "
          f"torch {torch.__version__}\n")  # fmt: skip
    print(f"| sentences x words | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for name, words in CASES.items():
        cells = []
        for kind in KINDS.values():
            torch.manual_seed(0)
            options = {"dtype": torch.float32, **kind}
            count = lengths(64, True) if words is None else torch.tensor(words)
            runs = {by: step(count, args.width, backend=by, **options) for by in ("cpu", "sdpa")}
            rows = interleave(
                runs, repeats=args.rounds, clock=partial(on_cpu, now=time.process_time)
            )
            cells.append(f"{ratio(rows['sdpa'], rows['cpu']):.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
