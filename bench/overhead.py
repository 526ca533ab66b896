"""What a call costs in eager mode beside its arithmetic, at one token: `python -m bench.overhead`.

First the norms beside those of torch, and beside an empty `torch.autograd.Function`. Then a stack
of boundaries, once with its launches and once with empty functions in their place: the second is
the cost of checks, allocations and autograd nodes. One thread, freed memory kept, CPU time of the
thread; the variants take turns.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepfast import ops
from deepfast.clock import on_cpu
from deepfast.measure.clock import interleave, keep_memory
from deepfast.nn import DLCL, DepthHistory, LayerNorm

LAYERS, DIM, DROPOUT = 200, 16, 0.1
CALLS, WIDTH = 100, 64


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


def microseconds(variants: dict[str, Callable], calls: int, rounds: int = 25) -> dict[str, float]:
    """Of one of the ``calls`` in a run of each variant, the median."""
    clock = partial(on_cpu, now=time.thread_time)
    rows = interleave(variants, repeats=rounds, warmup=3, clock=clock)
    return {name: round(row.median / calls * 1e6, 1) for name, row in rows.items()}


def boundaries(kind: str) -> dict[str, float]:
    """One boundary, forward alone and with backward, with and without launches."""
    variants = {}
    for launches, name in ((True, "with launches"), (False, "Python alone")):
        forward = make(kind, launches=launches)
        variants[f"forward, {name}"] = forward
        variants[f"both ways, {name}"] = lambda f=forward: f().sum().backward()
    return microseconds(variants, LAYERS + 1)


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, dy):
        return dy


def norms() -> dict[str, float]:
    """One call of a norm on 1 x WIDTH, forward alone without gradients and both ways."""
    shapes = (1, WIDTH), (1, WIDTH), (WIDTH,), (WIDTH,)
    leaves = x, residual, weight, bias = [torch.randn(s, requires_grad=True) for s in shapes]
    dy = torch.randn(1, WIDTH)

    def torch_add_norm() -> tuple[Tensor, Tensor]:
        s = x + residual
        return F.layer_norm(s, (WIDTH,), weight, bias), s

    forms: dict[str, Callable] = {
        "ops.layer_norm": lambda: (ops.layer_norm(x, weight, bias),),
        "torch's": lambda: (F.layer_norm(x, (WIDTH,), weight, bias),),
        "ops.add_layer_norm": lambda: ops.add_layer_norm(x, residual, weight, bias),
        "torch's add and layer_norm": torch_add_norm,
        "an empty autograd.Function": lambda: (_Empty.apply(x),),
    }

    def forward(form: Callable) -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                form()

    def both(form: Callable) -> None:
        for _ in range(CALLS):
            results = form()
            torch.autograd.backward(results, (dy,) * len(results))
            for leaf in leaves:
                leaf.grad = None

    runs = (("forward", forward), ("both ways", both))
    variants = {f"{name}, {way}": partial(run, f) for name, f in forms.items() for way, run in runs}
    return microseconds(variants, CALLS)


def main() -> int:
    torch.set_num_threads(1)
    keep_memory()
    for name, value in norms().items():
        print(f"{value:6.1f} us {name}", flush=True)
    for kind in ("plain", "full"):
        for name, value in boundaries(kind).items():
            print(f"{value:6.1f} us {kind} boundary, {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
