"""The schedule that is counted is the schedule that runs."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast.measure import forms
from deepfast.measure.traffic import (
    PER_ROW,
    OpTraffic,
    engine_moved,
    forward_reads,
    states_moved,
)
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm

TOKENS, DIM = 5, 16


class LaunchTraffic(TorchDispatchMode):
    """Counts the states that every launch is told to read and write."""

    def __init__(self):
        super().__init__()
        self.moved = self.forward_reads = 0

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
            self.forward_reads += len(a.sources)
        elif name in ("pull_rows", "attend_pull"):
            # Gradients and states are read, sums written.
            self.moved += len(a.rows) + (2 + a.accumulate) * len(a.sources)
        elif name in ("boundary_forward", "attention_boundary_forward"):
            # y and what is added to it, the slot, the other states of the block, the partial sum,
            # the result.
            self.moved += 1 + (a.residual is not None) + 1 + (len(a.near) - 1)
            self.moved += (a.partial is not None) + 1
            self.forward_reads += len(a.near)
        elif name in ("boundary_backward", "attention_boundary_backward"):
            self.moved += (len(a.near) - 1) + (a.partial is not None)
            # Gradients of the block but its own row's, the far part, state k; then dx, g, dy, and
            # the part of the state before.
            self.moved += (len(a.pull_rows) - 1) + (a.pulled is not None) + 1 + 3
            self.moved += a.dresidual is not None


def dlcl(depth):
    return DLCL(depth, DIM)


def attention(depth):
    return AttentionResiduals(depth, DIM)


def blocks_of_3(depth):
    return AttentionResiduals(depth, DIM, block=3)


def windowed(depth):
    return AttentionResiduals(depth, DIM, window=5)


@pytest.mark.parametrize("depth", [3, 8, 40])
@pytest.mark.parametrize("make", [dlcl, attention, blocks_of_3, windowed])
def test_counted_from_the_launches_of_a_step(make, depth):
    module, norm = make(depth), LayerNorm(DIM)
    history = DepthHistory()
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    with LaunchTraffic() as counted:
        for _ in range(depth + 1):
            _, x = module(x, history, out_norm=norm.as_output(), return_x=False)
        reads = counted.forward_reads
        x.sum().backward()
    assert counted.moved == engine_moved(module.pattern, module.continues)
    if make in (dlcl, attention):
        assert counted.moved == states_moved("deepfast", depth)
        assert reads == forward_reads(depth)["schedule"]


def test_one_schedule_grows_below_the_square_of_the_depth():
    def growth(variant):
        return states_moved(variant, 200) / states_moved(variant, 100)

    for variant in PER_ROW.keys() - {"plain residual"}:
        assert growth(variant) == pytest.approx(4, rel=0.03)
    assert growth("deepfast") < 3.6
    assert states_moved("plain residual", 100) == 0
    assert states_moved("loop of adds, compiled", 100) is None


def test_forward_reads_stay_within_the_closed_form():
    for depth in (6, 30, 60, 100):
        reads = forward_reads(depth)
        assert reads["schedule"] <= reads["bound"]
        # Up to 8 rows make one block, which reads all below.
        assert reads["schedule"] < reads["all_below"] or depth == 6


def test_ops_are_counted_by_operands_and_results():
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    for run, states in (
        (lambda: x + y, 3),
        (lambda: x.add_(y), 3),
        (lambda: x.T[1:].unsqueeze(0), 0),
        (lambda: torch.empty_like(x), 0),
        (lambda: x + y[:1].expand(3, 4), 2 + 1 / 3),
    ):
        with OpTraffic() as traffic:
            run()
        assert traffic.nbytes == states * x.nbytes


def test_ops_of_the_plain_form_agree_with_its_schedule():
    module, depth = DLCL(24, 128), 24
    y, grad = torch.randn(256, 128, requires_grad=True), torch.randn(256, 128)
    with OpTraffic() as traffic:
        forms.mixing_alone(forms.StackAndSum, module, y, grad)
    # Its layer-norms are beyond the schedule.
    assert 1 < traffic.nbytes / y.nbytes / states_moved("stack and sum", depth) < 1.05
