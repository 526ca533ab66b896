"""The schedule: which states are read, how often, and in which blocks."""

from types import SimpleNamespace

import pytest
import torch

from deepfast.depth.schedule import block_cost, block_of, default_block, depth_pattern
from deepfast.measure.traffic import engine_moved
from deepfast.nn import DLCL, DepthHistory


def test_default_block_is_near_the_square_root():
    for rows in (16, 31, 61, 101):
        assert 0.5 <= default_block(rows) / rows**0.5 <= 1.5
    assert [default_block(rows) for rows in (1, 2, 8)] == [1, 2, 8]


def test_a_gpus_block_moves_the_fewest_states(monkeypatch):
    monkeypatch.setattr(f"{block_cost.__module__}.FAR_PASS", 0)
    for rows in (9, 25, 60):
        pattern = depth_pattern(rows, None, 1, 1)
        moved = {block: engine_moved(pattern, block=block) for block in range(2, 18)}
        same = {count - block_cost(rows, block, 64) for block, count in moved.items()}
        assert same == {7 * rows}
    monkeypatch.undo()
    for pulled, chosen in ((8, [8, 7, 5, 7, 7]), (16, [8, 7, 5, 7, 11])):
        assert [default_block(n, "cuda", pulled) for n in (8, 13, 25, 49, 97)] == chosen


def test_blocks_partition_the_rows():
    for block in (1, 3, 8, 1000):
        seen = sorted({block_of(block, k, 101) for k in range(101)})
        assert [k for s, e in seen for k in range(s, e)] == list(range(101))


class Reads:
    """What the launches of a pass read: states in forward, gradients in backward, and the pairs of
    a row and a state that it reads."""

    def __init__(self, launch):
        self.calls = []
        self.launch = SimpleNamespace(**{name: self.kept(name) for name in vars(launch)})
        self.launches = launch

    def kept(self, name):
        def launch(**operands):
            self.calls.append((name, operands))
            getattr(self.launches, name)(**operands)

        return launch

    def pairs(self):
        """Row 0 was pushed before the launches were kept."""
        found = {(0, 0)}
        for name, given in self.calls:
            if name == "mix_rows":
                found |= {(row, k) for row in given["rows"] for k in given["sources"]}
            elif name == "boundary_forward":
                found |= {(given["k"], k) for k in given["near"]}
        return found


def run(layers, block, **options):
    dlcl, history = DLCL(layers, 2, **options), DepthHistory(block=block)
    y = torch.randn(1, 2, requires_grad=True)
    x = dlcl(y, history)
    reads = Reads(history.depth_pass.launch)
    history.depth_pass.launch = reads.launch
    for _ in range(layers):
        x = dlcl(torch.tanh(x), history)
    x.sum().backward()
    return reads, dlcl


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"dilation": 3}, {"period": 4}, {"window": 9, "dilation": 2}]
)
@pytest.mark.parametrize("block", [1, 4, 100])
def test_only_the_pattern_is_read(options, block):
    reads, dlcl = run(20, block, **options)
    assert reads.pairs() == {(row, k) for row, ks in enumerate(dlcl.pattern) for k in ks}
