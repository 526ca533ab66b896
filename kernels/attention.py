"""Scaled dot-product attention over packed sentences: ``o = dropout(softmax(scale q k^T)) v``.

Where the keys of every sentence fit one tile, whole rows of scores stay on chip: forward needs no
running maximum, and backward is one kernel that reads each operand once and writes dq, dk and dv
once. Longer sentences use the running softmax of FlashAttention (Dao et al. 2022); backward then
has a kernel over tiles of queries for dq, and one over tiles of keys for dk and dv. Scores are
multiplied by log2(e), so that exp2 replaces exp.

N sentences, H heads of width D; one sentence has m queries and n keys; BQ, BK, BD sides of a tile.
Row strides are constexpr, which removes a third of the instructions that compute addresses.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common import dot, dropout_factors, launcher, rounded

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
def scores(b_q, b_k, o_q, o_k, m, n, scale, CAUSAL: tl.constexpr):
    """(BQ, BK) scores times log2(e); -inf where a query does not see a key."""
    b_s = dot(b_q, tl.trans(b_k)) * (scale * LOG2E)
    b_s += tl.where(o_k < n, 0.0, float("-inf"))[None, :]
    if CAUSAL:
        b_s = tl.where(o_k[None, :] <= o_q[:, None] + (n - m), b_s, float("-inf"))
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


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_fwd_kernel(
    p_q, p_k, p_v, p_cu_q, p_cu_k, p_seed, p_o, p_lse,
    TQ, H, scale, threshold, keep_scale,
    s_qh, s_kh, s_vh, s_oh,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_o: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    WHOLE_ROW: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The output of a tile of queries of one sentence and head."""
    i_h, start_q, m, start_k, n = sentence_and_head(p_cu_q, p_cu_k, H)
    first_query = tl.program_id(1) * BQ
    seed = None if p_seed is None else tl.load(p_seed)
    if first_query >= m:
        return
    p_k = rows_of(p_k, start_k, s_k, i_h, s_kh)
    p_v = rows_of(p_v, start_k, s_v, i_h, s_vh)
    o_q, o_k = first_query + tl.arange(0, BQ), tl.arange(0, BK)
    m_q, m_k = o_q < m, o_k < n
    o_token = (start_q + o_q) * H + i_h

    # The first tile of keys. Under WHOLE_ROW there is no other.
    b_q = load_rows(rows_of(p_q, start_q, s_q, i_h, s_qh), o_q, m_q, s_q, D, BD)
    b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
    b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
    b_s = scores(b_q, b_k, o_q, o_k, m, n, scale, CAUSAL)
    b_top = tl.max(b_s, 1)
    b_p = tl.math.exp2(b_s - finite(b_top)[:, None])
    b_sum = tl.sum(b_p, 1)
    if p_seed is not None:
        b_p = tl.where(kept(seed, o_token, 0, threshold, BQ, BK), b_p, 0.0)
    b_o = dot(rounded(b_p, b_v.dtype), b_v)
    if not WHOLE_ROW:
        end = tl.minimum(n, first_query + BQ + n - m) if CAUSAL else n
        for first_key in range(BK, end, BK):
            o_k = first_key + tl.arange(0, BK)
            m_k = o_k < n
            b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
            b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
            b_s = scores(b_q, b_k, o_q, o_k, m, n, scale, CAUSAL)
            b_new = tl.maximum(b_top, tl.max(b_s, 1))
            b_p = tl.math.exp2(b_s - finite(b_new)[:, None])
            b_shrink = tl.math.exp2(b_top - finite(b_new))
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
            if p_seed is not None:
                b_p = tl.where(kept(seed, o_token, first_key, threshold, BQ, BK), b_p, 0.0)
            b_o *= b_shrink[:, None]
            b_o = dot(rounded(b_p, b_v.dtype), b_v, b_o)
            b_top = b_new

    # A query that sees no key gets o = 0 / 1 and lse = -inf.
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_o *= (keep_scale / b_sum)[:, None]
    store_rows(rows_of(p_o, start_q, s_o, i_h, s_oh), b_o, o_q, m_q, s_o, D, BD)
    b_lse = (b_top + tl.math.log2(b_sum)) * LN2
    tl.store(p_lse + i_h * TQ + start_q + o_q, b_lse, mask=m_q)


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_bwd_kernel(
    p_q, p_k, p_v, p_lse, p_delta, p_do, p_cu_q, p_cu_k, p_seed, p_dq, p_dk, p_dv,
    TQ, H, scale, threshold, keep_scale,
    s_qh, s_kh, s_vh, s_doh, s_dqh, s_dkh, s_dvh,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_do: tl.constexpr,
    s_dq: tl.constexpr, s_dk: tl.constexpr, s_dv: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    WHOLE_ROW: tl.constexpr, ONE_TILE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys of one sentence and head; under WHOLE_ROW dq too.

    WHOLE_ROW: no sentence has more than BK keys. ONE_TILE: nor more than BQ queries.
    """
    i_h, start_q, m, start_k, n = sentence_and_head(p_cu_q, p_cu_k, H)
    first_key = tl.program_id(1) * BK
    seed = None if p_seed is None else tl.load(p_seed)
    if not WHOLE_ROW:
        if first_key >= n:
            return
        p_delta += i_h * TQ + start_q
    p_q = rows_of(p_q, start_q, s_q, i_h, s_qh)
    p_do = rows_of(p_do, start_q, s_do, i_h, s_doh)
    p_lse += i_h * TQ + start_q
    o_k = first_key + tl.arange(0, BK)
    m_k = o_k < n
    b_k = load_rows(rows_of(p_k, start_k, s_k, i_h, s_kh), o_k, m_k, s_k, D, BD)
    b_v = load_rows(rows_of(p_v, start_k, s_v, i_h, s_vh), o_k, m_k, s_v, D, BD)
    b_dk = tl.zeros((BK, BD), dtype=tl.float32)
    b_dv = tl.zeros((BK, BD), dtype=tl.float32)
    ds_scale = scale if p_seed is None else scale * keep_scale

    # Starts at the first tile with a query that sees these keys. Under WHOLE_ROW every tile runs,
    # because each must write its dq.
    first = 0
    if CAUSAL and not WHOLE_ROW:
        first = tl.maximum(first_key - (n - m), 0) // BQ * BQ
    # Under ONE_TILE the loop runs once, and each sum is stored as soon as it is complete.
    for first_query in range(first, BQ if ONE_TILE else m, BQ):
        o_q = first_query + tl.arange(0, BQ)
        m_q = o_q < m
        b_lse = load_lse(p_lse, o_q, m_q)
        b_q = load_rows(p_q, o_q, m_q, s_q, D, BD)
        b_do = load_rows(p_do, o_q, m_q, s_do, D, BD)
        b_p = tl.math.exp2(scores(b_q, b_k, o_q, o_k, m, n, scale, CAUSAL) - b_lse[:, None])
        b_w = b_p
        if p_seed is not None:
            o_token = (start_q + o_q) * H + i_h
            m_kept = kept(seed, o_token, first_key, threshold, BQ, BK)
            # A weight is never negative, so its sign can hold the mask.
            b_w, b_p = tl.where(m_kept, b_p, 0.0), tl.where(m_kept, b_p, -b_p)
        b_dv = dot(tl.trans(rounded(b_w, b_do.dtype)), b_do, b_dv)
        if ONE_TILE:
            b_dv = b_dv if p_seed is None else b_dv * keep_scale
            store_rows(rows_of(p_dv, start_k, s_dv, i_h, s_dvh), b_dv, o_k, m_k, s_dv, D, BD)
        b_dp = dot(b_do, tl.trans(b_v))
        if p_seed is not None:
            b_dp, b_p = tl.where(b_p > 0, b_dp, 0.0), tl.abs(b_p)
        if WHOLE_ROW:
            b_delta = tl.sum(b_p * b_dp, 1) * ds_scale
        else:
            b_delta = tl.load(p_delta + o_q, mask=m_q, other=0.0) * scale
        b_ds = rounded(b_p * (b_dp * ds_scale - b_delta[:, None]), b_q.dtype)
        b_dk = dot(tl.trans(b_ds), b_q, b_dk)
        if ONE_TILE:
            store_rows(rows_of(p_dk, start_k, s_dk, i_h, s_dkh), b_dk, o_k, m_k, s_dk, D, BD)
        if WHOLE_ROW:
            b_dq = dot(b_ds, b_k)
            store_rows(rows_of(p_dq, start_q, s_dq, i_h, s_dqh), b_dq, o_q, m_q, s_dq, D, BD)
    if not ONE_TILE:
        b_dv = b_dv if p_seed is None else b_dv * keep_scale
        store_rows(rows_of(p_dv, start_k, s_dv, i_h, s_dvh), b_dv, o_k, m_k, s_dv, D, BD)
        store_rows(rows_of(p_dk, start_k, s_dk, i_h, s_dkh), b_dk, o_k, m_k, s_dk, D, BD)


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_delta, p_do, p_cu_q, p_cu_k, p_seed, p_dq,
    TQ, H, scale, threshold, keep_scale,
    s_qh, s_kh, s_vh, s_oh, s_doh, s_dqh,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_o: tl.constexpr,
    s_do: tl.constexpr, s_dq: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries of one sentence and head, and ``delta = sum_d o do``."""
    i_h, start_q, m, start_k, n = sentence_and_head(p_cu_q, p_cu_k, H)
    first_query = tl.program_id(1) * BQ
    seed = None if p_seed is None else tl.load(p_seed)
    if first_query >= m:
        return
    p_k = rows_of(p_k, start_k, s_k, i_h, s_kh)
    p_v = rows_of(p_v, start_k, s_v, i_h, s_vh)
    o_q = first_query + tl.arange(0, BQ)
    m_q = o_q < m
    o_token = (start_q + o_q) * H + i_h
    b_q = load_rows(rows_of(p_q, start_q, s_q, i_h, s_qh), o_q, m_q, s_q, D, BD)
    b_o = load_rows(rows_of(p_o, start_q, s_o, i_h, s_oh), o_q, m_q, s_o, D, BD)
    b_do = load_rows(rows_of(p_do, start_q, s_do, i_h, s_doh), o_q, m_q, s_do, D, BD)
    b_lse = load_lse(p_lse + i_h * TQ + start_q, o_q, m_q)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(p_delta + i_h * TQ + start_q + o_q, b_delta, mask=m_q)
    b_delta *= scale
    b_dq = tl.zeros((BQ, BD), dtype=tl.float32)
    ds_scale = scale if p_seed is None else scale * keep_scale
    end = tl.minimum(n, first_query + BQ + n - m) if CAUSAL else n
    for first_key in range(0, end, BK):
        o_k = first_key + tl.arange(0, BK)
        m_k = o_k < n
        b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
        b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
        b_p = tl.math.exp2(scores(b_q, b_k, o_q, o_k, m, n, scale, CAUSAL) - b_lse[:, None])
        b_dp = dot(b_do, tl.trans(b_v))
        if p_seed is not None:
            m_kept = kept(seed, o_token, first_key, threshold, BQ, BK)
            b_dp = tl.where(m_kept, b_dp, 0.0)
        b_ds = rounded(b_p * (b_dp * ds_scale - b_delta[:, None]), b_k.dtype)
        b_dq = dot(b_ds, b_k, b_dq)
    store_rows(rows_of(p_dq, start_q, s_dq, i_h, s_dqh), b_dq, o_q, m_q, s_dq, D, BD)


class Launch(NamedTuple):
    """Sides of a tile, and Triton's options to compile it with."""

    BQ: int
    BK: int
    num_warps: int
    num_stages: int = 1


def side(length: int, most: int) -> int:
    """The side of a tile for sentences of at most ``length``."""
    return min(max(16, triton.next_power_of_2(length)), most)


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


def forward_launch(
    max_seqlen_q: int, max_seqlen_k: int, BD: int, itemsize: int
) -> tuple[Launch, bool]:
    """The launch, and whether each row of scores is kept whole."""
    queries, whole, part = largest_sides(BD, itemsize)
    BQ = side(max_seqlen_q, queries)
    if max_seqlen_k > whole:
        stages = 2 if BD <= 64 and itemsize == 2 else 1
        return Launch(BQ, part, warps(BQ, part, BD, itemsize), stages), False
    BK = side(max_seqlen_k, whole)
    return Launch(BQ, BK, warps(BQ, BK, BD, itemsize)), True


def backward_launch(
    max_seqlen_q: int, max_seqlen_k: int, BD: int, itemsize: int
) -> tuple[Launch, bool]:
    """The launch, and whether each row of scores is kept whole."""
    queries, whole, part = largest_sides(BD, itemsize)
    BQ, BK = side(max_seqlen_q, queries), side(max_seqlen_k, whole)
    one_tile = max_seqlen_q <= queries
    if max_seqlen_k > whole or (itemsize == 4 and not one_tile):
        return Launch(BQ, part, warps(BQ, part, BD, itemsize)), False
    if one_tile and max_seqlen_k <= queries:
        return Launch(BQ, BK, warps(BQ, BK, BD, itemsize)), True
    # dk and dv stay in registers through the loop over tiles of queries, so the tiles are smaller.
    BQ = min(BQ, queries // 2)
    num_warps = 8 if max_seqlen_k > queries else warps(BQ, BK, BD, itemsize)
    return Launch(BQ, BK, num_warps), True


@launcher
def attention_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, dropout_p,
    seed, o, lse,
):  # fmt: skip
    """``o = dropout(softmax(scale q k^T)) v`` for every sentence and head; lse (H, T_q)."""
    N, (TQ, H, D) = cu_seqlens_q.numel() - 1, q.shape
    if TQ == 0:
        return
    BD = side(D, 256)
    launch, whole_row = forward_launch(max_seqlen_q, max_seqlen_k, BD, q.element_size())
    operands = q, k, v, o
    attention_fwd_kernel[(N * H, triton.cdiv(max_seqlen_q, launch.BQ))](
        q, k, v, cu_seqlens_q, cu_seqlens_k, seed if dropout_p else None, o, lse,
        TQ, H, float(scale), *dropout_factors(dropout_p),
        *(x.stride(1) for x in operands), *(x.stride(0) for x in operands), D, BD,
        WHOLE_ROW=whole_row, CAUSAL=causal, **launch._asdict(),
    )  # fmt: skip


@launcher
def attention_backward(
    q, k, v, o, lse, do, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale,
    dropout_p, seed, dq, dk, dv,
):  # fmt: skip
    """Gradients of attention_forward from that of ``o``."""
    N, (TQ, H, D) = cu_seqlens_q.numel() - 1, q.shape
    if N == 0:
        return
    BD = side(D, 256)
    launch, whole_row = backward_launch(max_seqlen_q, max_seqlen_k, BD, q.element_size())
    seqlens_and_seed = cu_seqlens_q, cu_seqlens_k, seed if dropout_p else None
    sizes = TQ, H, float(scale), *dropout_factors(dropout_p)
    delta = None if whole_row else torch.empty_like(lse)
    if not whole_row:
        operands = q, k, v, o, do, dq
        attention_bwd_dq_kernel[(N * H, triton.cdiv(max_seqlen_q, launch.BQ))](
            q, k, v, o, lse, delta, do, *seqlens_and_seed, dq, *sizes,
            *(x.stride(1) for x in operands), *(x.stride(0) for x in operands), D, BD,
            CAUSAL=causal, **launch._asdict(),
        )  # fmt: skip
    operands = q, k, v, do, dq, dk, dv
    attention_bwd_kernel[(N * H, 1 if whole_row else triton.cdiv(max_seqlen_k, launch.BK))](
        q, k, v, lse, delta, do, *seqlens_and_seed, dq, dk, dv, *sizes,
        *(x.stride(1) for x in operands), *(x.stride(0) for x in operands), D, BD,
        WHOLE_ROW=whole_row, ONE_TILE=whole_row and max_seqlen_q <= launch.BQ, CAUSAL=causal,
        **launch._asdict(),
    )  # fmt: skip
