"""The schedule: which states are read, how often, and in which blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepfast.depth.depth_pass import Launches
from deepfast.depth.schedule import block_cost, block_of, default_block, depth_pattern
from deepfast.measure.traffic import engine_moved
from deepfast.nn import DLCL, DepthHistory


def test_default_block(monkeypatch):
    """Near the square root; on a GPU the one that moves the fewest states."""
    for rows in (16, 31, 61, 101):
        assert 0.5 <= default_block(rows) / rows**0.5 <= 1.5
    assert [default_block(rows) for rows in (1, 2, 8)] == [1, 2, 8]
    for pulled, chosen in ((8, [8, 7, 5, 7, 7]), (16, [8, 7, 5, 7, 11])):
        assert [default_block(n, "cuda", pulled) for n in (8, 13, 25, 49, 97)] == chosen
    monkeypatch.setattr(f"{block_cost.__module__}.FAR_PASS", 0)
    for rows in (9, 25, 60):
        pattern = depth_pattern(rows, None, 1, 1)
        moved = {block: engine_moved(pattern, block=block) for block in range(2, 18)}
        same = {count - block_cost(rows, block, 64) for block, count in moved.items()}
        assert same == {7 * rows}


@given(st.integers(1, 1000), st.integers(1, 101))
def test_blocks_partition_the_rows(block, rows):
    seen = sorted({block_of(block, k, rows) for k in range(rows)})
    assert [k for s, e in seen for k in range(s, e)] == list(range(rows))


def pairs_read(dlcl, history):
    """Each pair of a row and a state that the launches of a pass read."""
    x = dlcl(torch.randn(1, 2, requires_grad=True), history)
    found, launches = {(0, 0)}, history.depth_pass.launch

    def noted(name):
        def launch(**operands):
            if name == "mix":
                found.update((row, k) for row in operands["rows"] for k in operands["sources"])
            elif name == "forward":
                found.update((operands["k"], k) for k in operands["near"])
            getattr(launches, name)(**operands)

        return launch

    history.depth_pass.launch = Launches(*map(noted, Launches._fields))
    for _ in range(dlcl.num_layers):
        x = dlcl(torch.tanh(x), history)
    x.sum().backward()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"dilation": 3}, {"period": 4}, {"window": 9, "dilation": 2}]
)
@pytest.mark.parametrize("block", [1, 4, 100])
def test_only_the_pattern_is_read(options, block):
    dlcl = DLCL(20, 2, **options)
    found = pairs_read(dlcl, DepthHistory(block=block))
    assert found == {(row, k) for row, ks in enumerate(dlcl.pattern) for k in ks}
