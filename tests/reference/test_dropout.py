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


def test_philox_equals_the_one_by_hand():
    counters = torch.randint(0, 2**32, (50, 3))
    counters[0], counters[1] = 0, MASK
    for seed in (0, 1, MASK, 2**32, 2**63 - 1, 0x299F31D0A4093822):
        words = torch.stack(philox(seed, *counters.unbind(1)), 1)
        for counter, got in zip(counters.tolist(), words.tolist(), strict=True):
            assert got == philox_by_hand([*counter, 0], [seed & MASK, seed >> 32])


def test_which_draw_a_channel_takes():
    mask = dropout_mask(9, 5, 130, 0.5)
    for t, d in [(0, 0), (1, 15), (2, 16), (3, 63), (4, 64), (4, 129)]:
        a, j, i = d // 64, d % 64 // 16, d % 16
        draw = philox_by_hand([16 * a + i, t, 0, 0], [9, 0])[j]
        assert mask[t, d] == (2.0 if draw >= 2**31 else 0.0)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_keep_rate(p):
    n = 300 * 257
    mask = dropout_mask(4, 300, 257, p)
    kept = mask.count_nonzero().item()
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5
    assert mask.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    # Neither tokens nor channels stand out.
    for rate in ((mask > 0).double().mean(0), (mask > 0).double().mean(1)):
        assert (rate - (1 - p)).abs().max() < 6 * (p * (1 - p) / 257) ** 0.5


def test_seeds_tokens_and_channels_are_independent():
    mask = (dropout_mask(1, 200, 200, 0.5) > 0).double() - 0.5
    other = (dropout_mask(2, 200, 200, 0.5) > 0).double() - 0.5
    for shifted in (other, mask.roll(1, 0), mask.roll(1, 1), mask.roll(16, 1), mask.T):
        assert (mask * shifted).mean().abs() / 0.25 < 5 / 200


def test_ends():
    assert dropout_mask(1, 20, 30, 0.0).eq(1).all()
    assert dropout_mask(1, 20, 30, 1.0).eq(0).all()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_tokens(p):
    assert dropout_mask(1, 0, 30, p).shape == (0, 30)


def test_a_longer_batch_keeps_the_draws_of_a_shorter_one():
    assert torch.equal(dropout_mask(1, 9, 70, 0.5)[:4, :65], dropout_mask(1, 4, 65, 0.5))
