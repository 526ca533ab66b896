"""The schedule that is counted is the schedule that runs."""

from types import SimpleNamespace

import pytest
import torch

from deepfast.measure.traffic import SCHEDULES, forward_reads, states_moved
from deepfast.nn import DLCL, DepthHistory, LayerNorm


class CountingLaunch:
    """Counts the states that every launch is told to read and write."""

    def __init__(self, launch):
        self.launch, self.moved, self.forward_reads = launch, 0, 0

    def namespace(self):
        names = ("mix_rows", "pull_rows", "boundary_forward", "boundary_backward")
        wrapped = {name: getattr(self, name) for name in names}
        return SimpleNamespace(**wrapped)

    def mix_rows(self, states, sources, weight, rows, *rest):
        self.moved += len(sources) + len(rows)
        if torch.is_grad_enabled() or not self.in_backward:
            self.forward_reads += len(sources)
        return self.launch.mix_rows(states, sources, weight, rows, *rest)

    def pull_rows(self, grads, slots, rows, states, sources, *rest):
        # Gradients and states are read, sums written.
        self.moved += len(rows) + 2 * len(sources)
        return self.launch.pull_rows(grads, slots, rows, states, sources, *rest)

    def boundary_forward(self, *args):
        near, partial = args[6], args[12]
        # y, its slot, the other states of the block, the partial sum, the result.
        self.moved += 2 + (len(near) - 1) + (partial is not None) + 1
        self.forward_reads += len(near)
        return self.launch.boundary_forward(*args)

    def boundary_backward(self, *args):
        near, partial, pulls, pulled = args[2], args[7], args[20], args[22]
        self.moved += (len(near) - 1) + (partial is not None)
        # Gradients of the block but its own row's, the far part, state k; then dx, g, dy.
        self.moved += (len(pulls) - 1) + (pulled is not None) + 1 + 3
        return self.launch.boundary_backward(*args)

    in_backward = False


@pytest.mark.parametrize("depth", [3, 8, 40])
def test_counted_from_the_launches_of_a_step(depth, monkeypatch):
    from deepfast.depth import dlcl as module

    real = module.backends.choose
    counters = []

    def choose(op, *rest):
        name, launch = real(op, *rest)
        if op != "boundary":
            return name, launch
        counters.append(CountingLaunch(launch))
        return name, counters[-1].namespace()

    monkeypatch.setattr(module.backends, "choose", choose)
    dlcl, norm = DLCL(depth, 16), LayerNorm(16)
    history = DepthHistory()
    x = torch.randn(5, 16, requires_grad=True)
    for _ in range(depth + 1):
        _, x = dlcl(x, history, out_norm=norm.as_output(), want_x=False)
    (counter,) = counters
    assert counter.forward_reads == forward_reads(depth)["schedule"]
    counter.in_backward = True
    x.sum().backward()
    assert counter.moved == states_moved("deepfast", depth)


def test_one_schedule_grows_below_the_square_of_the_depth():
    def growth(variant):
        return states_moved(variant, 200) / states_moved(variant, 100)

    for variant in SCHEDULES.keys() - {"deepfast", "plain residual"}:
        assert growth(variant) == pytest.approx(4, rel=0.03)
    assert growth("deepfast") < 3.6
    assert states_moved("plain residual", 100) == 0
    assert states_moved("loop of adds, compiled", 100) is None


def test_forward_reads_stay_within_the_closed_form():
    for depth in (6, 30, 60, 100):
        reads = forward_reads(depth)
        assert reads["schedule"] <= reads["bound"] < reads["all_below"]
