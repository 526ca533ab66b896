"""The specification of attention residuals against that of the op, and its limits."""

import pytest
import torch

from deepfast.reference.depth_attention import depth_attention
from tests.specifications.attention_residuals import attend, block, full

LAYERS, DIM = 5, 6


@pytest.fixture
def given():
    """v_0 .. v_L and the queries."""
    v = list(torch.randn(LAYERS + 1, 3, DIM, dtype=torch.float64))
    return v, torch.randn(LAYERS + 1, DIM, dtype=torch.float64)


@pytest.mark.parametrize("row", range(LAYERS + 1))
def test_full_is_attention_over_all_below(given, row):
    v, w = given
    torch.testing.assert_close(full(v, w, row), depth_attention(v[: row + 1], w[row])[0])


@pytest.mark.parametrize("row", range(LAYERS + 1))
def test_blocks_of_one_layer_are_the_full_form(given, row):
    v, w = given
    torch.testing.assert_close(block(v, w, row, 1), full(v, w, row))


def test_blocks_by_hand(given):
    v, w = given
    rows = {
        0: [v[0]],
        1: [v[0], v[1]],
        2: [v[0], v[1] + v[2]],
        3: [v[0], v[1] + v[2], v[3]],
        4: [v[0], v[1] + v[2], v[3] + v[4]],
        5: [v[0], v[1] + v[2], v[3] + v[4], v[5]],
    }
    for row, values in rows.items():
        torch.testing.assert_close(block(v, w, row, 2), attend(values, w[row]))


def test_one_block_attends_to_the_embedding_and_the_plain_residual_sum(given):
    v, w = given
    expected = attend([v[0], sum(v[1:])], w[LAYERS])
    torch.testing.assert_close(block(v, w, LAYERS, LAYERS), expected)
    torch.testing.assert_close(block(v, w, LAYERS, 99), expected)
