"""The schedule that is counted is the schedule that runs."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast.measure.traffic import engine_moved
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm

TOKENS, DIM = 5, 16


class LaunchTraffic(TorchDispatchMode):
    """Counts the states that every launch is told to read and write."""

    def __init__(self):
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if space == "deepfast":
            names = (a.name for a in func._schema.arguments)
            self.count(name, SimpleNamespace(**dict(zip(names, args, strict=False))))
        elif name in ("zero_", "add_") and args[0].shape[-2:] == (TOKENS, DIM):
            # A buffer of sums written, or a state added to another one.
            states = args[0].numel() // (TOKENS * DIM)
            self.moved += states * (1 if name == "zero_" else 3)
        return func(*args, **(kwargs or {}))

    def count(self, name, a):
        if name in ("mix_rows", "attend_rows"):
            # Sums that a pass adds to are read, too.
            self.moved += len(a.sources) + (1 + a.accumulate) * len(a.rows)
        elif name in ("pull_rows", "attend_pull"):
            # Gradients and states are read, sums written.
            self.moved += len(a.rows) + (2 + a.accumulate) * len(a.sources)
        elif name in ("boundary_forward", "attention_boundary_forward"):
            # y and what is added to it, the slot, the other states of the block, the partial sum,
            # the result.
            self.moved += 1 + (a.residual is not None) + 1 + (len(a.near) - 1)
            self.moved += (a.partial is not None) + 1
        elif name in ("boundary_backward", "attention_boundary_backward"):
            self.moved += (len(a.near) - 1) + (a.partial is not None)
            # Gradients of the block but its own row's, the far part, state k; then dx, g, dy, and
            # the part of the state before.
            self.moved += (len(a.pull_rows) - 1) + (a.pulled is not None) + 1 + 3
            self.moved += a.dresidual is not None


MAKES = {
    "DLCL": DLCL,
    "attention": AttentionResiduals,
    "blocks of 3": partial(AttentionResiduals, block=3),
    "window": partial(AttentionResiduals, window=5),
}


@pytest.mark.parametrize("depth", [3, 8, 40])
@pytest.mark.parametrize("make", MAKES)
def test_counted_from_the_launches_of_a_step(make, depth):
    module, norm = MAKES[make](depth, DIM), LayerNorm(DIM)
    history = DepthHistory()
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    with LaunchTraffic() as counted:
        for _ in range(depth + 1):
            _, x = module(x, history, out_norm=norm.as_output(), return_x=False)
        x.sum().backward()
    assert counted.moved == engine_moved(module.pattern, module.continues)
