"""Parts of the kernels of attention: loads, scores and dropout of a tile, and the sides of tiles.

Names as in `kernels/attention.py`.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from .common import dot, rounded
from .launch import next_power_of_2

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@triton.jit
def sentence(p_cu_seqlens, i_n):
    """The first row of sentence i_n and its number of rows."""
    start = tl.load(p_cu_seqlens + i_n)
    return start.to(tl.int64), tl.load(p_cu_seqlens + i_n + 1) - start


@triton.jit
def sentence_and_head(p_cu_q, p_cu_k, H):
    """A program's head, and the first row and the number of its queries, then of its keys."""
    i_n, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    start_q, m = sentence(p_cu_q, i_n)
    start_k, n = sentence(p_cu_k, i_n)
    return i_h, start_q, m, start_k, n


@triton.jit
def rows_of(p_x, start, s_t: tl.constexpr, i_h, s_h):
    """A pointer to the first row of one sentence and head."""
    return p_x + start * s_t + i_h * s_h


@triton.jit
def tile(o_t, m_t, s_t: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Offsets and mask of the rows o_t. Channels need no mask where D == BD."""
    o_d = tl.arange(0, BD)
    mask = m_t[:, None] if D == BD else m_t[:, None] & (o_d < D)[None, :]
    return o_t.to(tl.int64)[:, None] * s_t + o_d[None, :], mask


@triton.jit
def load_rows(p_x, o_t, m_t, s_t: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    offsets, mask = tile(o_t, m_t, s_t, D, BD)
    return tl.load(p_x + offsets, mask=mask, other=0.0)


@triton.jit
def store_rows(p_x, b_x, o_t, m_t, s_t: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    offsets, mask = tile(o_t, m_t, s_t, D, BD)
    tl.store(p_x + offsets, rounded(b_x, p_x.dtype.element_ty), mask=mask)


@triton.jit
def scores(b_q, b_k, o_q, o_k, m, n, scale, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(BQ, BK) scores times log2(e); -inf where a query does not see a key."""
    b_s = dot(b_q, tl.trans(b_k)) * (scale * LOG2E)
    b_s += tl.where(o_k < n, 0.0, float("-inf"))[None, :]
    if RIGHT >= 0:
        b_s = tl.where(o_k[None, :] <= o_q[:, None] + (n - m + RIGHT), b_s, float("-inf"))
    if LEFT >= 0:
        b_s = tl.where(o_k[None, :] >= o_q[:, None] + (n - m - LEFT), b_s, float("-inf"))
    return b_s


@triton.jit
def finite(b_top):
    """Replaces -inf, the maximum of a row that sees no key, by 0: exp2(-inf - 0) is 0, not NaN."""
    return tl.where(b_top == float("-inf"), 0.0, b_top)


@triton.jit
def load_lse(p_lse, o_q, m_q):
    """lse times log2(e). -inf, of a row that sees no key, becomes inf: exp2(-inf - inf) is 0."""
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)


@triton.jit
def kept(seed, o_token, first_key, threshold, BQ: tl.constexpr, BK: tl.constexpr):
    """(BQ, BK) bool: the weights that dropout keeps, see `deepfast.reference.dropout`.

    The mask's token is ``query * H + head``; its channel is the key's position in its sentence.
    """
    zeros = tl.zeros((BQ, BK // 8), dtype=tl.uint32)
    groups = (first_key // 8 + tl.arange(0, BK // 8)).to(tl.uint32)[None, :] + zeros
    low = (o_token & 0xFFFFFFFF).to(tl.uint32)[:, None] + zeros
    high = (o_token >> 32).to(tl.uint32)[:, None] + zeros
    w0, w1, w2, w3 = tl.philox(seed, groups, low, high, zeros)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BQ, BK // 8, 8)).to(tl.int32)
    # The eight draws of a counter become bits of one number, so that little data moves to the
    # threads that hold the scores. The bits are summed as floats: with a sum of integers the
    # compiler would compute the draws a second time.
    bit = (1 << tl.arange(0, 8))[None, None, :]
    bits = tl.sum(tl.where(draws >= threshold, bit.to(tl.float32), 0.0), axis=2).to(tl.int32)
    return tl.reshape((bits[:, :, None] & bit) != 0, (BQ, BK))


def reached(left: int, right: int, max_seqlen_q: int, max_seqlen_k: int) -> tuple[int, int]:
    """The sides of a window; -1 where no sentence is long enough to reach the side's end."""
    return left if left < max_seqlen_k - 1 else -1, right if right < max_seqlen_q - 1 else -1


class Launch(NamedTuple):
    """Sides of a tile, and Triton's options to compile it with."""

    BQ: int
    BK: int
    num_warps: int
    num_stages: int = 1


def side(length: int, most: int) -> int:
    """The side of a tile for sentences of at most ``length``."""
    return min(max(16, next_power_of_2(length)), most)


def largest_sides(BD: int, itemsize: int) -> tuple[int, int, int]:
    """The most queries of a tile, the most keys of a whole row, and the keys of a part of one.

    Found by compiling. Registers set the limit; fp32, which has no tensor cores, needs most.
    """
    if itemsize == 4:
        return (32, 32, 16) if BD <= 64 else (16, 16, 16)
    if BD <= 64:
        return 64, 128, 64
    return (64, 64, 32) if BD <= 128 else (32, 32, 16)


def warps(BQ: int, BK: int, BD: int, itemsize: int) -> int:
    if BD > 64 or itemsize == 4:
        return 8
    return 2 if max(BQ, BK) <= 32 else 4


def sides(
    max_seqlen_q: int, max_seqlen_k: int, BD: int, itemsize: int, G: int = 1, *, backward: bool
) -> tuple[Launch, bool]:
    """Returns the launch, and whether it keeps each row of scores whole."""
    queries, whole, part = largest_sides(BD, itemsize)
    BQ, BK = side(max_seqlen_q, queries), side(max_seqlen_k, whole)
    # Each head of a group has tiles of its own.
    one_tile = max_seqlen_q <= queries and G == 1
    if max_seqlen_k > whole or (backward and itemsize == 4 and not one_tile):
        stages = 1 if backward or BD > 64 or itemsize == 4 else 2
        return Launch(BQ, part, warps(BQ, part, BD, itemsize), stages), False
    if not backward or (one_tile and max_seqlen_k <= queries):
        return Launch(BQ, BK, warps(BQ, BK, BD, itemsize)), True
    # dk and dv stay in registers through the loop over tiles of queries, so the tiles are smaller.
    BQ = min(BQ, queries // 2)
    num_warps = 8 if max_seqlen_k > queries else warps(BQ, BK, BD, itemsize)
    return Launch(BQ, BK, num_warps), True


def keys_launch(launch: Launch, BD: int, G: int, left: int) -> Launch:
    """The launch of dk and dv of longer rows. Beside a group or a window, tiles of 64 queries of
    wide heads need more registers than there are."""
    if BD > 64 and launch.BQ == 64 and (G > 1 or left >= 0):
        return launch._replace(BQ=32, num_warps=4)
    return launch
