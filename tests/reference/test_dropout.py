"""The dropout mask of the specification: Philox by its published answers, and the mask by hand."""

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


@pytest.mark.parametrize("make", [int, torch.tensor])
def test_philox(make):
    """The last word of our counters is 0, so the published ones check the form by hand."""
    for counter, key, expected in KNOWN:
        assert philox_by_hand(counter, key) == expected
    counters = torch.randint(0, 2**32, (50, 3))
    counters[0], counters[1] = 0, MASK
    for seed in (0, 1, -1, MASK, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822):
        words = torch.stack(philox(make(seed), *counters.unbind(1)), 1)
        for counter, got in zip(counters.tolist(), words.tolist(), strict=True):
            assert got == philox_by_hand([*counter, 0], [seed & MASK, seed >> 32 & MASK])


def draw_by_hand(seed, t, d):
    word = philox_by_hand([d // 8, t, 0, 0], [seed & MASK, seed >> 32 & MASK])[d % 8 // 2]
    return word >> 16 if d % 2 else word & 0xFFFF


def test_the_mask_by_hand():
    """Also where p is rounded to 0 or to 1. A draw that is the threshold itself is kept."""
    draws = torch.tensor([[draw_by_hand(-9, t, d) for d in range(130)] for t in range(5)])
    for p in (0.0, 2**-18, 0.01, 0.3, 0.9, 1 - 2**-18, 1.0, draws[3, 63].item() / 65536):
        threshold = round(p * 65536)
        # Scaled by the rounded probability, so that the mean does not change.
        scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
        assert torch.equal(dropout_mask(-9, 5, 130, p), (draws >= threshold).double() * scale)
