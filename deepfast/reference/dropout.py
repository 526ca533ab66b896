"""Dropout by counter: a mask is a function of (seed, token, channel) and is never stored.

Philox4x32-10 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for 32-bit values held in int64."""
    low, high = b * (a & 0xFFFF), b * (a >> 16)
    top = high + (low >> 16)
    return top >> 16, ((top & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor) -> list[Tensor]:
    """Four words of 32 random bits, as int64, for each counter (c0, c1, c2, 0)."""
    c = [c0, c1, c2, torch.zeros_like(c0)]
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_M0, c[0])
        high1, low1 = _multiply(_M1, c[2])
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c


def dropout_mask(seed: int, tokens: int, dim: int, p: float, *, device=None) -> Tensor:
    """The factors dropout multiplies by: 0 with probability p, else 1 / (1 - p).

    Channels are numbered in groups of 64: channel ``64 a + 16 j + i`` of token ``t`` takes word
    ``j`` of counter ``(16 a + i, t mod 2^32, t div 2^32, 0)`` and is kept when that word is at
    least ``p * 2^32``.

    Returns:
        (tokens, dim) float64.
    """
    groups = -(-dim // 64)
    counters = torch.arange(16 * groups, device=device).expand(tokens, -1)
    t = torch.arange(tokens, device=device).unsqueeze(1).expand_as(counters)
    words = philox(seed, counters, t & _MASK, t >> 32)
    draws = torch.stack([w.view(tokens, groups, 16) for w in words], dim=2)
    draws = draws.reshape(tokens, 64 * groups)[:, :dim]
    threshold = min(int(p * 2**32), _MASK)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return (draws >= threshold).double() * scale
