"""The dropout mask of the specification: Philox itself, and the mask's statistics."""

import pytest
import torch

from deepfast.reference.dropout import dropout_mask, philox

MASK = 0xFFFFFFFF


def philox_by_hand(counter, key):
    """Philox4x32-10 in Python's own integers, from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


# Random123's kat_vectors, philox4x32 10.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox_by_hand(counter, key) == expected


@pytest.mark.parametrize("make", [int, torch.tensor])
def test_philox_equals_the_one_by_hand(make):
    counters = torch.randint(0, 2**32, (50, 3))
    counters[0], counters[1] = 0, MASK
    for seed in (0, 1, -1, MASK, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822):
        words = torch.stack(philox(make(seed), *counters.unbind(1)), 1)
        for counter, got in zip(counters.tolist(), words.tolist(), strict=True):
            assert got == philox_by_hand([*counter, 0], [seed & MASK, seed >> 32 & MASK])


def draw_by_hand(seed, t, d):
    word = philox_by_hand([d // 8, t, 0, 0], [seed & MASK, seed >> 32 & MASK])[d % 8 // 2]
    return word >> 16 if d % 2 else word & 0xFFFF


def test_which_draw_a_channel_takes():
    for t, d in [(0, 0), (0, 1), (1, 2), (1, 7), (2, 8), (3, 63), (4, 64), (4, 129)]:
        draw = draw_by_hand(-9, t, d)
        # Kept where the threshold is the draw itself, dropped one above it.
        assert dropout_mask(-9, 5, 130, draw / 65536)[t, d] > 0
        assert dropout_mask(-9, 5, 130, (draw + 1) / 65536)[t, d] == 0


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_keep_rate(p):
    n = 300 * 257
    mask = dropout_mask(4, 300, 257, p)
    kept = mask.count_nonzero().item()
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5
    # Scaled by the rounded probability, so that the mean does not change.
    assert mask.unique().tolist() == [0, 65536 / (65536 - round(p * 65536))]
    # No token and no channel differs from the others.
    for rate in ((mask > 0).double().mean(0), (mask > 0).double().mean(1)):
        assert (rate - (1 - p)).abs().max() < 6 * (p * (1 - p) / 257) ** 0.5


def test_seeds_tokens_and_channels_are_independent():
    mask = (dropout_mask(1, 200, 200, 0.5) > 0).double() - 0.5
    other = (dropout_mask(2, 200, 200, 0.5) > 0).double() - 0.5
    # Shifted by a token, a half word, a word, a counter.
    shifts = [(1, 0), (1, 1), (2, 1), (8, 1)]
    for shifted in (other, mask.T, *(mask.roll(*shift) for shift in shifts)):
        assert (mask * shifted).mean().abs() / 0.25 < 5 / 200


def test_ends():
    assert dropout_mask(1, 20, 30, 0.0).eq(1).all()
    assert dropout_mask(1, 20, 30, 1.0).eq(0).all()
    # p is rounded to 0 and to 1.
    assert dropout_mask(1, 20, 30, 2.0**-18).eq(1).all()
    assert dropout_mask(1, 20, 30, 1 - 2.0**-18).eq(0).all()
