"""Attention over depth: a softmax over the sources of each token, and their weighted sum.

    s_kh = q_h . v_k r_k, or the given scores,  r_k = 1 / sqrt(mean(v_k^2) + eps), 1 without norm
    out_h = sum_k p_kh v_k,  p_kh = exp(s_kh - most_h) / total_h,  lse_h = most_h + log(total_h)

    delta_h = <dout_h, out_h> - dlse_h,  ds_kh = p_kh (<dout_h, v_k> - delta_h)
    dv_k = sum_h (p_kh dout_h + ds_kh r_k q_h) - v_k r_k^2 / D sum_h ds_kh s_kh
    dq_h = sum over tokens and sources of ds_kh r_k v_k

with the largest score most_h and total_h = sum_k exp(s_kh - most_h). The softmax is computed online
(Milakov, Gimelshein 2018), and backward recomputes the scores from the sources, which it reads
anyway. Without most_h and total_h there is no softmax: p_kh = s_kh and ds_kh = <dout_h, v_k>.

A launch takes up to 16 sources; between launches forward keeps the sum so far in fp32. In forward
the programs of a token's hops run side by side, so that all but the first read a source from the
L2 cache.
"""

import torch
import triton
import triton.language as tl

from .attend import join, no_sum
from .common import (
    SOURCES,
    flat_rows,
    inverse_rms,
    load_rows,
    load_stat,
    multiprocessors,
    pick,
    row_channels,
    row_sum,
    row_tile,
    source_group,
    store_rows,
    store_stat,
    store_sum,
)
from .launch import cdiv, launch, launcher
from .sums import sum_partials


@triton.jit(do_not_specialize=["T", "K", "s_scores"])
def depth_attention_fwd_kernel(
    sources, p_query, p_scores, p_sum, p_out, p_lse, p_most, p_total,
    T, K, eps,
    s_sources, s_scores,
    H: tl.constexpr, NORM: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One axis for both, because the other axes of a grid have at most 65535 programs.
    h, first = tl.program_id(0) % H, tl.program_id(0) // H * BT
    o_row, o_flat, m = flat_rows(first, T, D, BA, BT, BC)
    o_t = (first + tl.arange(0, BT)).to(tl.int64)
    m_t = o_t < T
    o_stat = o_t * H + h
    o_sum = (o_row * H + h) * D + o_flat
    if p_query is not None:
        b_q = load_rows(p_query + h * D + o_flat, o_flat < D, BA, BT, BC)
    b_sum, b_most, b_total = no_sum(BA, BT, BC)
    if p_sum is not None:
        b_sum = load_rows(p_sum + o_sum, m, BA, BT, BC)
        if p_most is not None:
            b_most, b_total = load_stat(p_most, o_stat, m_t), load_stat(p_total, o_stat, m_t)
    for k in tl.range(0, K, num_stages=STAGES):
        p_v = pick(sources, k) + o_row * pick(s_sources, k) + o_flat
        b_v = load_rows(p_v, m, BA, BT, BC).to(tl.float32)
        if p_query is not None:
            b_s = row_sum(b_v * b_q)
            if NORM:
                b_s *= inverse_rms(b_v, D, eps)
        else:
            b_s = load_stat(p_scores, o_t * s_scores + k * H + h, m_t)
        if p_most is None:
            b_sum += b_s * b_v
        else:
            b_sum, b_most, b_total = join(b_sum, b_most, b_total, b_s, b_v, False)
    if p_most is not None:
        store_stat(p_most, b_most, o_stat, m_t)
        store_stat(p_total, b_total, o_stat, m_t)
    if p_lse is not None:
        store_stat(p_lse, b_most + tl.log(b_total), o_stat, m_t)
        b_sum = b_sum / b_total
    store_rows(p_out + o_sum, b_sum, m, BA, BT, BC)


@triton.jit
def _delta(
    p_out, p_dlse, b_dout, o_r, m, m_r, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """``<dout, out> - dlse`` of the rows o_r, (1, BT, 1); ``p_out`` (BA * BT, BC)."""
    b_delta = row_sum(load_rows(p_out, m, BA, BT, BC).to(tl.float32) * b_dout)
    return b_delta if p_dlse is None else b_delta - load_stat(p_dlse, o_r, m_r)


@triton.jit(do_not_specialize=["R"])
def depth_attention_delta_kernel(
    p_out, p_dout, p_dlse, p_delta,
    R,
    s_dout,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BT
    o_row, o_flat, m = flat_rows(first, R, D, BA, BT, BC)
    o_r = (first + tl.arange(0, BT)).to(tl.int64)
    b_dout = load_rows(p_dout + o_row * s_dout + o_flat, m, BA, BT, BC).to(tl.float32)
    b_delta = _delta(p_out + o_row * D + o_flat, p_dlse, b_dout, o_r, m, o_r < R, BA, BT, BC)
    store_stat(p_delta, b_delta, o_r, o_r < R)


@triton.jit(do_not_specialize=["T", "K", "s_scores"])
def depth_attention_bwd_kernel(
    sources, p_query, p_scores, p_out, p_most, p_total, p_dout, p_dlse, p_delta, dsources, p_slopes,
    p_dscores, p_partial,
    T, K, eps,
    s_sources, s_dout, s_dsources, s_scores,
    H: tl.constexpr, NORM: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    b_dq = tl.zeros((BA, BT, BC), dtype=tl.float32)
    _, o_w, _ = flat_rows(0, T, D, BA, BT, BC)
    if p_query is not None and H == 1:
        b_q = load_rows(p_query + o_w, o_w < D, BA, BT, BC)
    for start in tl.range(program * BT, T, programs * BT):
        o_row, o_flat, m = flat_rows(start, T, D, BA, BT, BC)
        o_t = (start + tl.arange(0, BT)).to(tl.int64)
        m_t = o_t < T
        if H == 1:
            b_dout = load_rows(p_dout + o_row * s_dout + o_flat, m, BA, BT, BC).to(tl.float32)
            if p_most is not None:
                b_most = load_stat(p_most, o_t, m_t)
                b_total = load_stat(p_total, o_t, m_t, 1.0)
                p_o = p_out + o_row * D + o_flat
                b_delta = _delta(p_o, p_dlse, b_dout, o_t, m, m_t, BA, BT, BC)
        for k in tl.range(0, K, num_stages=STAGES):
            p_v = pick(sources, k) + o_row * pick(s_sources, k) + o_flat
            b_v = load_rows(p_v, m, BA, BT, BC).to(tl.float32)
            b_r = inverse_rms(b_v, D, eps) if NORM else 1.0
            b_u = tl.zeros((BA, BT, BC), dtype=tl.float32)
            b_back = tl.zeros((1, BT, 1), dtype=tl.float32)
            for h in range(0, H):
                if H > 1:
                    # Read again for every source, so it comes from a cache.
                    p_g = p_dout + (o_row * H + h) * s_dout + o_flat
                    b_dout = load_rows(p_g, m, BA, BT, BC).to(tl.float32)
                    if p_most is not None:
                        b_most = load_stat(p_most, o_t * H + h, m_t)
                        b_total = load_stat(p_total, o_t * H + h, m_t, 1.0)
                        b_delta = load_stat(p_delta, o_t * H + h, m_t)
                    if p_query is not None:
                        b_q = load_rows(p_query + h * D + o_w, o_w < D, BA, BT, BC)
                o_score = o_t * s_scores + k * H + h
                if p_query is not None:
                    b_s = row_sum(b_v * b_q) * b_r
                else:
                    b_s = load_stat(p_scores, o_score, m_t)
                b_p, b_ds = b_s, row_sum(b_v * b_dout)
                if p_most is not None:
                    b_p = tl.exp(b_s - b_most) / b_total
                    b_ds = b_p * (b_ds - b_delta)
                b_u += b_p * b_dout
                if p_query is not None:
                    b_c = b_ds * b_r
                    b_u += b_c * b_q
                    b_back += b_ds * b_s
                    if p_partial is not None:
                        # Tokens after the last one add rows of zeros.
                        b_dq += b_c * b_v
                    if p_slopes is not None:
                        store_stat(p_slopes, b_c, o_score, m_t)
                if p_dscores is not None:
                    store_stat(p_dscores, b_ds, o_score, m_t)
            if dsources is not None:
                if NORM:
                    b_u -= b_v * (b_r * b_r * b_back / D)
                p_du = pick(dsources, k) + o_row * pick(s_dsources, k) + o_flat
                store_rows(p_du, b_u, m, BA, BT, BC)
    if p_partial is not None:
        o_d = row_channels(BA, BC)
        store_sum(p_partial + program.to(tl.int64) * D + o_d, b_dq, o_d < D)


@triton.jit(do_not_specialize=["T", "K", "s_slopes"])
def depth_attention_query_kernel(
    sources, p_slopes, p_partial,
    T, K,
    s_sources, s_slopes,
    H: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read the same sources, each for its own hop.
    h, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b_dq = tl.zeros((BA, BT, BC), dtype=tl.float32)
    for start in tl.range(chunk * BT, T, chunks * BT):
        o_row, o_flat, m = flat_rows(start, T, D, BA, BT, BC)
        o_t = (start + tl.arange(0, BT)).to(tl.int64)
        for k in tl.range(0, K, num_stages=STAGES):
            p_v = pick(sources, k) + o_row * pick(s_sources, k) + o_flat
            b_v = load_rows(p_v, m, BA, BT, BC).to(tl.float32)
            b_dq += load_stat(p_slopes, o_t * s_slopes + k * H + h, o_t < T) * b_v
    o_d = row_channels(BA, BC)
    store_sum(p_partial + (chunk.to(tl.int64) * H + h) * D + o_d, b_dq, o_d < D)


def _columns(table, first, H):
    """A table (T, K, H) from source ``first`` on, or None."""
    return None if table is None else table.view(-1)[first * H :]


@launcher
def depth_attention_forward(a):
    (T, D), K = a.sources[0].shape, len(a.sources)
    H = a.scores.shape[2] if a.query is None else a.query.shape[0]
    tile = row_tile(D, a.out.element_size(), per_thread=32, num_warps=4)
    more = SOURCES.value < K
    carried = a.out.new_empty(T * H, D, dtype=torch.float32) if more else None
    for first in range(0, K, SOURCES.value):
        last = first + SOURCES.value >= K
        launch(
            depth_attention_fwd_kernel, (H * cdiv(T, tile.BT),), a,
            **source_group(a.sources, first), p_scores=_columns(a.scores, first, H), s_scores=K * H,
            p_sum=carried if first else None, p_out=a.out if last else carried,
            p_lse=a.lse if last else None, T=T, K=min(SOURCES.value, K - first), H=H,
            STAGES=3 if D <= 2048 else 2, D=D, **tile._asdict(),
        )  # fmt: skip


@launcher
def depth_attention_backward(a):
    (T, D), K = a.sources[0].shape, len(a.sources)
    H = a.scores.shape[2] if a.query is None else a.query.shape[0]
    tile = row_tile(D, a.dout.element_size(), per_thread=16, num_warps=4)
    sides = tile._asdict() | {"D": D}
    delta = torch.empty_like(a.most) if H > 1 and a.most is not None else None
    if delta is not None:
        # With one hop the main kernel computes delta itself, once for all sources.
        programs = (cdiv(T * H, tile.BT),)
        launch(depth_attention_delta_kernel, programs, a, p_delta=delta, R=T * H, **sides)
    # How many programs run at once with 168 registers per thread: 3 of 4 warps, 2 of 8, 1 of 16.
    programs = (1 + 8 // tile.num_warps) * multiprocessors(a.dout.device)
    chunks = min(cdiv(T, tile.BT), programs)
    groups = cdiv(K, SOURCES.value)
    learns = a.dquery is not None
    # With several hops another kernel sums the gradients of their queries.
    slopes = a.most.new_empty(T, K, H) if learns and H > 1 else None
    hop_chunks = min(chunks, cdiv(programs, H))
    partial = a.most.new_empty(groups, hop_chunks, 1, H, D) if learns else None
    # Reading fp32 tiles ahead would not leave enough registers.
    stages = 1 if a.dout.element_size() == 4 else 3
    for i, first in enumerate(range(0, K, SOURCES.value)):
        common = sides | source_group(a.sources, first) | {
            "T": T, "H": H, "K": min(SOURCES.value, K - first),
            "p_slopes": _columns(slopes, first, H),
        }  # fmt: skip
        launch(
            depth_attention_bwd_kernel, (chunks,), a, **common,
            **source_group(a.dsources, first, "dsources"), s_scores=K * H,
            p_scores=_columns(a.scores, first, H), p_dscores=_columns(a.dscores, first, H),
            p_delta=delta, p_partial=partial[i] if learns and H == 1 else None,
            STAGES=stages if H == 1 else 1, maxnreg=min(168, 2048 // tile.num_warps),
        )  # fmt: skip
        if slopes is not None:
            launch(
                depth_attention_query_kernel, (H, hop_chunks), a, **common, s_slopes=K * H,
                p_partial=partial[i], STAGES=stages,
            )  # fmt: skip
    if learns:
        sum_partials(partial.flatten(0, 1), a.dquery)
