"""Attention with fewer heads of keys and with windows, in modules and stacks, written out."""

import pytest
import torch

from deepfast.nn import MultiheadAttention, Packing, TransformerDecoder
from tests.nn.written_out import DIM, assert_same, attend, leaf, shaken

HEADS, FFN, LENGTH = 6, 20, 7
RIGHT = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4], [1]])
PADDINGS = {
    "none": None,
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "between": torch.tensor([[0, 1, 0, 0, 1, 1, 0], [0] * 7, [1, 1, 0, 1, 0, 1, 1]]).bool(),
}
# num_kv_heads and window.
PATTERNS = [(1, None), (2, 2), (3, (1, 3)), (6, (0, 2)), (2, (None, 1)), (2, (3, None)), (6, 99)]


# Causal attention has its padding on the right.
@pytest.mark.parametrize(
    ("padding", "causal"),
    [*((name, False) for name in PADDINGS), ("none", True), ("right", True)],
)
@pytest.mark.parametrize(("kv", "window"), PATTERNS, ids=str)
def test_self_attention(exact_backend, kv, window, padding, causal):
    m = MultiheadAttention(DIM, HEADS, num_kv_heads=kv, window=window, backend=exact_backend)
    shaken(m)
    x, padding = leaf(3, LENGTH, DIM), PADDINGS[padding]
    keep = torch.ones(3, LENGTH).bool() if padding is None else ~padding
    packing = Packing.of(3, LENGTH, padding)
    got = packing.unpack(m(packing.pack(x), packing, causal=causal))
    want = attend(m, x, padding=padding, causal=causal) * keep[..., None]
    assert_same(got, want, m, [x], keep)


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_cross_attention(exact_backend, kv):
    m = shaken(MultiheadAttention(DIM, HEADS, num_kv_heads=kv, cross=True, backend=exact_backend))
    x, encoded, padding = leaf(3, 5, DIM), leaf(3, LENGTH, DIM), RIGHT
    packing, at = Packing(3, 5), Packing.of(3, LENGTH, padding)
    got = m(packing.pack(x), packing, encoded=at.pack(encoded), encoded_packing=at)
    assert_same(packing.unpack(got), attend(m, x, encoded, padding), m, [x, encoded])
    weights = m.weights(packing.pack(x), packing, at.pack(encoded), at)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5))


def test_widths_and_windows():
    m = MultiheadAttention(DIM, HEADS, num_kv_heads=2, window=(None, 2))
    assert m.query_key_value.weight.shape == (DIM + 2 * 4, DIM)
    assert m.window == (-1, 2)
    decoder = TransformerDecoder(1, DIM, HEADS, FFN, num_kv_heads=2, window=4)
    m = decoder.layers[0].cross_attention
    assert (m.query.out_features, m.key_value.out_features) == (DIM, 2 * 4)
    assert (decoder.layers[0].attention.window, m.window) == ((4, 4), (-1, -1))
