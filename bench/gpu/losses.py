"""GPU benchmark of linear_cross_entropy: a step of the vocabulary projection and its loss."""

import importlib.util

import torch
import torch.nn.functional as F

from bench.gpu import peers
from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import ours, random
from deepfast import ops

SMOOTHING = 0.1


def _liger():
    """Liger's fused linear cross entropy, as a function of (hidden, weight, target)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=SMOOTHING)
    return lambda hidden, weight, target: loss(weight, hidden, target)


def linear_cross_entropy(bench: Bench) -> None:
    for vocabulary in (32000, 128256):
        bench.attempt(_linear_cross_entropy, vocabulary)


def _linear_cross_entropy(bench: Bench, vocabulary: int) -> None:
    T, D = bench.size((8192, 512), (8, 16))
    V = bench.size(vocabulary, vocabulary // 1000)
    hidden = random(bench, T, D, grad=True)
    weight = (torch.randn(V, D, device=bench.device) / D**0.5).bfloat16().requires_grad_()
    target = torch.randint(V, (T,), device=bench.device)

    def own(by):
        return lambda h, w, t: ops.linear_cross_entropy(
            h, w, t, label_smoothing=SMOOTHING, backend=by
        )

    def plain(h, w, t):
        return F.cross_entropy(F.linear(h, w).float(), t, label_smoothing=SMOOTHING)

    forms = {ours(by): lambda by=by: own(by) for by in bench.backends("linear_cross_entropy")}
    forms |= {"torch": lambda: plain, "torch.compile": lambda: peers.compiled(plain, bench.toy)}
    if importlib.util.find_spec("liger_kernel") is not None and not bench.toy:
        forms["Liger"] = _liger

    def maker(form):
        def make():
            loss = form()

            def run():
                return torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))

            # No graph: Liger's form reads a count back to the host. Python's share is small here.
            return Variant(run=run, graph=False)

        return make

    what = f"linear cross entropy, T={T}, D={D}, V={V}, bf16"
    timings = bench.case(what, {name: maker(form) for name, form in forms.items()})
    for by in bench.backends("linear_cross_entropy"):
        if ours(by) in timings and "torch" in timings:
            ratio = timings["torch"].median / timings[ours(by)].median
            bench.target(f"{what}, {by}, times as fast as torch", ratio, 1.0)
