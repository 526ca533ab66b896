"""Scaled dot-product attention over packed sentences: ``o = dropout(softmax(scale q k^T)) v``.

Where the keys of every sentence fit one tile, whole rows of scores stay on chip: forward needs no
running maximum, and backward is one kernel that reads each operand once and writes dq, dk and dv
once. Longer sentences use the running softmax of FlashAttention (Dao et al. 2022); backward then
has a kernel over tiles of queries for dq, and one over tiles of keys for dk and dv. Scores are
multiplied by log2(e), so that exp2 replaces exp.

G heads of queries share one head of keys and values: head h reads head h // G. Query i of a
sentence stands at key i + n - m, and sees the keys from LEFT before it to RIGHT after it; -1 is a
side without end. Tiles of keys outside of the windows of all queries of a tile are not read.

N sentences, H heads of width D; one sentence has m queries and n keys; BQ, BK, BD sides of a tile.
Row strides are constexpr, which removes a third of the instructions that compute addresses.
"""

import torch
import triton
import triton.language as tl

from .attention_tiles import (
    LN2,
    finite,
    kept,
    keys_launch,
    load_lse,
    load_rows,
    reached,
    rows_of,
    scores,
    sentence_and_head,
    side,
    sides,
    store_rows,
)
from .common import dot, rounded
from .launch import cdiv, launch, launcher


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_fwd_kernel(
    p_q, p_k, p_v, p_cu_seqlens_q, p_cu_seqlens_k, p_seed, p_o, p_lse,
    TQ, H, softmax_scale, threshold, scale,
    s1_q, s1_k, s1_v, s1_o,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_o: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    G: tl.constexpr, WHOLE_ROW: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """The output of a tile of queries of one sentence and head."""
    i_h, start_q, m, start_k, n = sentence_and_head(p_cu_seqlens_q, p_cu_seqlens_k, H)
    first_query = tl.program_id(1) * BQ
    seed = None if p_seed is None else tl.load(p_seed)
    if first_query >= m:
        return
    p_k = rows_of(p_k, start_k, s_k, i_h // G, s1_k)
    p_v = rows_of(p_v, start_k, s_v, i_h // G, s1_v)
    begin = 0
    if LEFT >= 0 and not WHOLE_ROW:
        begin = tl.maximum(first_query + n - m - LEFT, 0) // BK * BK
    o_q, o_k = first_query + tl.arange(0, BQ), begin + tl.arange(0, BK)
    m_q, m_k = o_q < m, o_k < n
    o_token = (start_q + o_q) * H + i_h

    # The first tile of keys that is read. Under WHOLE_ROW there is no other.
    b_q = load_rows(rows_of(p_q, start_q, s_q, i_h, s1_q), o_q, m_q, s_q, D, BD)
    b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
    b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
    b_s = scores(b_q, b_k, o_q, o_k, m, n, softmax_scale, LEFT, RIGHT)
    b_top = tl.max(b_s, 1)
    b_p = tl.math.exp2(b_s - finite(b_top)[:, None])
    b_sum = tl.sum(b_p, 1)
    if p_seed is not None:
        b_p = tl.where(kept(seed, o_token, begin, threshold, BQ, BK), b_p, 0.0)
    b_o = dot(rounded(b_p, b_v.dtype), b_v)
    if not WHOLE_ROW:
        end = tl.minimum(n, first_query + BQ + n - m + RIGHT) if RIGHT >= 0 else n
        for first_key in range(begin + BK, end, BK):
            o_k = first_key + tl.arange(0, BK)
            m_k = o_k < n
            b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
            b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
            b_s = scores(b_q, b_k, o_q, o_k, m, n, softmax_scale, LEFT, RIGHT)
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
    b_o *= (scale / b_sum)[:, None]
    store_rows(rows_of(p_o, start_q, s_o, i_h, s1_o), b_o, o_q, m_q, s_o, D, BD)
    b_lse = (b_top + tl.math.log2(b_sum)) * LN2
    tl.store(p_lse + i_h * TQ + start_q + o_q, b_lse, mask=m_q)


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_bwd_kernel(
    p_q, p_k, p_v, p_lse, p_delta, p_dout, p_cu_seqlens_q, p_cu_seqlens_k, p_seed, p_dq, p_dk, p_dv,
    TQ, H, softmax_scale, threshold, scale,
    s1_q, s1_k, s1_v, s1_dout, s1_dq, s1_dk, s1_dv,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_dout: tl.constexpr,
    s_dq: tl.constexpr, s_dk: tl.constexpr, s_dv: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    G: tl.constexpr, WHOLE_ROW: tl.constexpr, ONE_TILE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys of one sentence and head of keys; under WHOLE_ROW dq too.

    WHOLE_ROW: no sentence has more than BK keys. ONE_TILE: nor more than BQ queries, and G is 1.
    """
    i_g, start_q, m, start_k, n = sentence_and_head(p_cu_seqlens_q, p_cu_seqlens_k, H // G)
    first_key = tl.program_id(1) * BK
    seed = None if p_seed is None else tl.load(p_seed)
    # Two conditions, because the first is known when the kernel is compiled.
    if not WHOLE_ROW:  # noqa: SIM102
        if first_key >= n:
            return
    o_k = first_key + tl.arange(0, BK)
    m_k = o_k < n
    b_k = load_rows(rows_of(p_k, start_k, s_k, i_g, s1_k), o_k, m_k, s_k, D, BD)
    b_v = load_rows(rows_of(p_v, start_k, s_v, i_g, s1_v), o_k, m_k, s_v, D, BD)
    b_dk = tl.zeros((BK, BD), dtype=tl.float32)
    b_dv = tl.zeros((BK, BD), dtype=tl.float32)
    ds_scale = softmax_scale if p_seed is None else softmax_scale * scale

    # The tiles with a query that sees these keys. Under WHOLE_ROW every tile runs, because each
    # must write its dq.
    first, end = 0, m
    if RIGHT >= 0 and not WHOLE_ROW:
        first = tl.maximum(first_key - (n - m) - RIGHT, 0) // BQ * BQ
    if LEFT >= 0 and not WHOLE_ROW:
        end = tl.minimum(first_key + BK - (n - m) + LEFT, m)
    # Tiles of the same queries of all heads of the group come after each other.
    if G > 1:
        first, end = first * G, tl.cdiv(end, BQ) * BQ * G
    # Under ONE_TILE the loop runs once, and each sum is stored as soon as it is complete.
    for step in range(first, BQ if ONE_TILE else end, BQ):
        i_h, first_query = i_g, step
        if G > 1:
            i_h, first_query = i_g * G + step // BQ % G, step // (BQ * G) * BQ
        p_q_h = rows_of(p_q, start_q, s_q, i_h, s1_q)
        p_do_h = rows_of(p_dout, start_q, s_dout, i_h, s1_dout)
        p_lse_h = p_lse + i_h * TQ + start_q
        o_q = first_query + tl.arange(0, BQ)
        m_q = o_q < m
        b_lse = load_lse(p_lse_h, o_q, m_q)
        b_q = load_rows(p_q_h, o_q, m_q, s_q, D, BD)
        b_do = load_rows(p_do_h, o_q, m_q, s_dout, D, BD)
        b_s = scores(b_q, b_k, o_q, o_k, m, n, softmax_scale, LEFT, RIGHT)
        b_p = tl.math.exp2(b_s - b_lse[:, None])
        b_w = b_p
        if p_seed is not None:
            o_token = (start_q + o_q) * H + i_h
            m_kept = kept(seed, o_token, first_key, threshold, BQ, BK)
            # A weight is never negative, so its sign can hold the mask.
            b_w, b_p = tl.where(m_kept, b_p, 0.0), tl.where(m_kept, b_p, -b_p)
        b_dv = dot(tl.trans(rounded(b_w, b_do.dtype)), b_do, b_dv)
        if ONE_TILE:
            b_dv = b_dv if p_seed is None else b_dv * scale
            store_rows(rows_of(p_dv, start_k, s_dv, i_g, s1_dv), b_dv, o_k, m_k, s_dv, D, BD)
        b_dp = dot(b_do, tl.trans(b_v))
        if p_seed is not None:
            b_dp, b_p = tl.where(b_p > 0, b_dp, 0.0), tl.abs(b_p)
        if WHOLE_ROW:
            b_delta = tl.sum(b_p * b_dp, 1) * ds_scale
        else:
            p_delta_h = p_delta + i_h * TQ + start_q
            b_delta = tl.load(p_delta_h + o_q, mask=m_q, other=0.0) * softmax_scale
        b_ds = rounded(b_p * (b_dp * ds_scale - b_delta[:, None]), b_q.dtype)
        b_dk = dot(tl.trans(b_ds), b_q, b_dk)
        if ONE_TILE:
            store_rows(rows_of(p_dk, start_k, s_dk, i_g, s1_dk), b_dk, o_k, m_k, s_dk, D, BD)
        if WHOLE_ROW:
            b_dq = dot(b_ds, b_k)
            p_dq_h = rows_of(p_dq, start_q, s_dq, i_h, s1_dq)
            store_rows(p_dq_h, b_dq, o_q, m_q, s_dq, D, BD)
    if not ONE_TILE:
        b_dv = b_dv if p_seed is None else b_dv * scale
        store_rows(rows_of(p_dv, start_k, s_dv, i_g, s1_dv), b_dv, o_k, m_k, s_dv, D, BD)
        store_rows(rows_of(p_dk, start_k, s_dk, i_g, s1_dk), b_dk, o_k, m_k, s_dk, D, BD)


@triton.jit(do_not_specialize=["TQ", "threshold"])
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_delta, p_dout, p_cu_seqlens_q, p_cu_seqlens_k, p_seed, p_dq,
    TQ, H, softmax_scale, threshold, scale,
    s1_q, s1_k, s1_v, s1_o, s1_dout, s1_dq,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, s_o: tl.constexpr,
    s_dout: tl.constexpr, s_dq: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    G: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries of one sentence and head, and ``delta = sum_d o do``."""
    i_h, start_q, m, start_k, n = sentence_and_head(p_cu_seqlens_q, p_cu_seqlens_k, H)
    first_query = tl.program_id(1) * BQ
    seed = None if p_seed is None else tl.load(p_seed)
    if first_query >= m:
        return
    p_k = rows_of(p_k, start_k, s_k, i_h // G, s1_k)
    p_v = rows_of(p_v, start_k, s_v, i_h // G, s1_v)
    o_q = first_query + tl.arange(0, BQ)
    m_q = o_q < m
    o_token = (start_q + o_q) * H + i_h
    b_q = load_rows(rows_of(p_q, start_q, s_q, i_h, s1_q), o_q, m_q, s_q, D, BD)
    b_o = load_rows(rows_of(p_o, start_q, s_o, i_h, s1_o), o_q, m_q, s_o, D, BD)
    b_do = load_rows(rows_of(p_dout, start_q, s_dout, i_h, s1_dout), o_q, m_q, s_dout, D, BD)
    b_lse = load_lse(p_lse + i_h * TQ + start_q, o_q, m_q)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(p_delta + i_h * TQ + start_q + o_q, b_delta, mask=m_q)
    b_delta *= softmax_scale
    b_dq = tl.zeros((BQ, BD), dtype=tl.float32)
    ds_scale = softmax_scale if p_seed is None else softmax_scale * scale
    end = tl.minimum(n, first_query + BQ + n - m + RIGHT) if RIGHT >= 0 else n
    begin = 0
    if LEFT >= 0:
        begin = tl.maximum(first_query + n - m - LEFT, 0) // BK * BK
    for first_key in range(begin, end, BK):
        o_k = first_key + tl.arange(0, BK)
        m_k = o_k < n
        b_k = load_rows(p_k, o_k, m_k, s_k, D, BD)
        b_v = load_rows(p_v, o_k, m_k, s_v, D, BD)
        b_p = tl.math.exp2(
            scores(b_q, b_k, o_q, o_k, m, n, softmax_scale, LEFT, RIGHT) - b_lse[:, None]
        )
        b_dp = dot(b_do, tl.trans(b_v))
        if p_seed is not None:
            m_kept = kept(seed, o_token, first_key, threshold, BQ, BK)
            b_dp = tl.where(m_kept, b_dp, 0.0)
        b_ds = rounded(b_p * (b_dp * ds_scale - b_delta[:, None]), b_k.dtype)
        b_dq = dot(b_ds, b_k, b_dq)
    store_rows(rows_of(p_dq, start_q, s_dq, i_h, s1_dq), b_dq, o_q, m_q, s_dq, D, BD)


@launcher
def attention_forward(a):
    N, (TQ, H, D) = a.cu_seqlens_q.numel() - 1, a.q.shape
    BD, G = side(D, 256), H // a.k.shape[1]
    left, right = reached(a.left, a.right, a.max_seqlen_q, a.max_seqlen_k)
    itemsize = a.q.element_size()
    tile, whole_row = sides(a.max_seqlen_q, a.max_seqlen_k, BD, itemsize, backward=False)
    launch(
        attention_fwd_kernel, (N * H, cdiv(a.max_seqlen_q, tile.BQ)), a, TQ=TQ, H=H,
        softmax_scale=float(a.scale), D=D, BD=BD, G=G, WHOLE_ROW=whole_row, LEFT=left, RIGHT=right,
        **tile._asdict(),
    )  # fmt: skip


@launcher
def attention_backward(a):
    N, (TQ, H, D) = a.cu_seqlens_q.numel() - 1, a.q.shape
    BD, G = side(D, 256), H // a.k.shape[1]
    left, right = reached(a.left, a.right, a.max_seqlen_q, a.max_seqlen_k)
    itemsize = a.q.element_size()
    tile, whole_row = sides(a.max_seqlen_q, a.max_seqlen_k, BD, itemsize, G, backward=True)
    given = {"TQ": TQ, "H": H, "softmax_scale": float(a.scale), "D": D, "BD": BD, "G": G}
    given |= {"LEFT": left, "RIGHT": right, "p_delta": None}
    if not whole_row:
        given["p_delta"] = torch.empty_like(a.lse)
        programs = N * H, cdiv(a.max_seqlen_q, tile.BQ)
        launch(attention_bwd_dq_kernel, programs, a, **given, **tile._asdict())
        tile = keys_launch(tile, BD, G, left)
    launch(
        attention_bwd_kernel, (N * H // G, 1 if whole_row else cdiv(a.max_seqlen_k, tile.BK)), a,
        **given, WHOLE_ROW=whole_row, ONE_TILE=whole_row and a.max_seqlen_q <= tile.BQ and G == 1,
        **tile._asdict(),
    )  # fmt: skip
