"""The schedule: which states are read, how often, and in which blocks."""

from types import SimpleNamespace

import pytest
import torch

from deepfast.depth.schedule import default_block, near_rows
from deepfast.nn import DLCL, DepthHistory


def test_default_block_is_near_the_square_root():
    for rows in (16, 31, 61, 101):
        assert 0.5 <= default_block(rows) / rows**0.5 <= 1.5
    assert default_block(2) >= 1


def test_near_rows_partition_the_rows():
    for block in (1, 3, 8, 1000):
        seen = sorted({near_rows(block, k, 101) for k in range(101)})
        assert [k for s, e in seen for k in range(s, e)] == list(range(101))


class Reads:
    """Counts the states and gradients that each launch reads."""

    def __init__(self, launch):
        self.launch, self.mixed, self.pulled, self.pairs = launch, [], [], set()

    def wrap(self):
        return SimpleNamespace(
            **vars(self.launch)
            | {name: getattr(self, name) for name in ("mix_rows", "pull_rows")}
            | {"boundary_forward": self.forward, "boundary_backward": self.backward}
        )

    def mix_rows(self, *, sources, rows, **rest):
        self.mixed.append(len(sources))
        self.pairs |= {(row, k) for row in rows for k in sources}
        self.launch.mix_rows(sources=sources, rows=rows, **rest)

    def pull_rows(self, *, rows, **rest):
        self.pulled.append(len(rows))
        self.launch.pull_rows(rows=rows, **rest)

    def forward(self, *, k, near, **rest):
        self.mixed.append(len(near))
        self.pairs |= {(k, j) for j in near}
        self.launch.boundary_forward(k=k, near=near, **rest)

    def backward(self, *, pull_rows, **rest):
        self.pulled.append(len(pull_rows))
        self.launch.boundary_backward(pull_rows=pull_rows, **rest)


def run(layers, block, **options):
    dlcl, history = DLCL(layers, 2, **options), DepthHistory(block=block)
    y = torch.randn(1, 2, requires_grad=True)
    x = dlcl(y, history)
    reads = Reads(history.state.launch)
    reads.pairs.add((0, 0))
    history.state.launch = reads.wrap()
    for _ in range(layers):
        x = dlcl(torch.tanh(x), history)
    x.sum().backward()
    return reads, dlcl


@pytest.mark.parametrize(("layers", "block"), [(100, 10), (60, 8), (31, 4)])
def test_traffic_is_that_of_the_design(layers, block):
    """L^2/(2B) + L*B/2 + O(L) state reads, forward and backward alike."""
    reads, _ = run(layers, block)
    expected = layers**2 / (2 * block) + layers * block / 2 + 2 * layers
    assert sum(reads.mixed) <= expected
    assert sum(reads.pulled) <= expected


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"dilation": 3}, {"period": 4}, {"window": 9, "dilation": 2}]
)
@pytest.mark.parametrize("block", [1, 4, 100])
def test_only_the_pattern_is_read(options, block):
    reads, dlcl = run(20, block, **options)
    assert reads.pairs == {(row, k) for row, ks in enumerate(dlcl.pattern) for k in ks}
