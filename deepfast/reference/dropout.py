"""Dropout from a counter: the mask is a function of (seed, token, channel) and is never stored.

Philox4x32-10 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype

Seed = int | Tensor | None
"""64 bits, as an int or as a 0-dim int64 tensor; None without dropout."""

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for 32-bit values held in int64."""
    low, high = b * (a & 0xFFFF), b * (a >> 16)
    top = high + (low >> 16)
    return top >> 16, ((top & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int | Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> list[Tensor]:
    """Four words of 32 random bits, as int64, for each counter (c0, c1, c2, 0)."""
    c = [c0, c1, c2, torch.zeros_like(c0)]
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_M0, c[0])
        high1, low1 = _multiply(_M1, c[2])
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c


def _threshold(p: float) -> int:
    """The smallest 16-bit draw that is kept."""
    return int(p * 65536 + 0.5)


def dropout_scale(p: float) -> float:
    """The factor of a kept element: 1 / (1 - p), with p rounded to 16 bits."""
    threshold = _threshold(p)
    return 65536 / (65536 - threshold) if threshold < 65536 else 0.0


def dropout_mask(
    seed: int | Tensor, tokens: int, dim: int, p: float, *, device: torch.device | None = None
) -> Tensor:
    """The factors that dropout multiplies by: 0 with probability p, else 1 / (1 - p).

    A draw has 16 bits, so p is rounded to ``threshold / 2^16``. Channel ``8 a + 2 w + h`` of token
    ``t`` takes half ``h`` (0 the low one) of word ``w`` of the Philox counter
    ``(a, t mod 2^32, t div 2^32, 0)`` under the key ``seed``, and is kept when that draw is at
    least ``threshold``.

    Args:
        seed: 64 bits, as an int or as a 0-dim int64 tensor on ``device``; the host does not read
            the tensor.

    Returns:
        (tokens, dim) float64.
    """
    groups = -(-dim // 8)
    counters = torch.arange(groups, device=device).expand(tokens, -1)
    t = torch.arange(tokens, device=device).unsqueeze(1).expand_as(counters)
    words = torch.stack(philox(seed, counters, t & _MASK, t >> 32), dim=-1)
    draws = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    draws = draws.view(tokens, 8 * groups)[:, :dim]
    return (draws >= _threshold(p)).double() * dropout_scale(p)


def dropout(x: Tensor, p: float, seed: Seed) -> Tensor:
    """``x`` (T, D) times its mask. A dropped element is 0, even where it was infinite or NaN."""
    if p == 0:
        return x
    mask = dropout_mask(seed, x.shape[0], x.shape[1], p, device=x.device).to(x.dtype)
    return torch.where(mask > 0, x * mask, 0)


def add_dropout(x: Tensor, residual: Tensor | None, p: float, seed: Seed) -> Tensor:
    """``residual + dropout(x)``, shaped like x (..., D), rounded once."""
    s = x.to(compute_dtype(x.dtype))
    s = dropout(s.reshape(-1, s.shape[-1]), p, seed).view(s.shape)
    return (s if residual is None else s + residual.to(s.dtype)).to(x.dtype)
