"""The Python overhead of one boundary in eager mode, without its launches, at one token.

    python -m bench.overhead

A stack of boundaries runs once with its launches and once with empty functions in their place. The
second is the cost of checks, allocations and autograd nodes. One thread, freed memory kept, CPU
time of the thread; the variants take turns.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from deepfast.clock import on_cpu
from deepfast.measure.clock import interleave, keep_memory
from deepfast.nn import DLCL, DepthHistory, LayerNorm

LAYERS, DIM, DROPOUT = 200, 16, 0.1


def _nothing(**_) -> None:
    """Replaces a launch."""


def make(kind: str, *, launches: bool) -> Callable[[], torch.Tensor]:
    """A forward pass over LAYERS + 1 boundaries, "plain" or "full". A full one has a residual,
    dropout and the next layer's LN, as in a pre-norm encoder."""
    full = kind == "full"
    # A window keeps the launch itself as small as possible.
    dlcl, norm = DLCL(LAYERS, DIM, window=1), LayerNorm(DIM)
    x = torch.randn(1, DIM, requires_grad=True)

    def forward():
        history, branch, residual = DepthHistory(), x, None
        for k in range(LAYERS + 1):
            if full:
                residual, branch = dlcl(
                    branch, history, residual=residual, dropout_p=DROPOUT, out_norm=norm.as_output()
                )
            else:
                branch = dlcl(branch, history)
            if k == 0 and not launches:
                names = vars(history.state.launch)
                history.state.launch = SimpleNamespace(**dict.fromkeys(names, _nothing))
        return branch

    return forward


def measure(kind: str, rounds: int = 25) -> dict[str, float]:
    """Microseconds per boundary, forward alone and with backward, with and without launches."""
    variants = {}
    for launches, name in ((True, "with launches"), (False, "Python alone")):
        forward = make(kind, launches=launches)
        variants[f"forward, {name}"] = forward
        variants[f"both ways, {name}"] = lambda f=forward: f().sum().backward()
    rows = interleave(
        variants, repeats=rounds, warmup=3, clock=partial(on_cpu, now=time.thread_time)
    )
    return {name: round(row.median / (LAYERS + 1) * 1e6, 1) for name, row in rows.items()}


def main() -> int:
    torch.set_num_threads(1)
    keep_memory()
    for kind in ("plain", "full"):
        row = ", ".join(f"{name} {value} us" for name, value in measure(kind).items())
        print(f"{kind} boundary: {row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
