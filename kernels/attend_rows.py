"""The far passes of attention residuals, of which `attend` has the equations.

    attend_rows    out_b = sum_k p_lk v_k for up to 16 rows l, with each row's softmax statistics
    attend_pull    out_j = what later rows l add to dv_j,  dq_l,  db_lj

Each launches a few kernels. Between them the scores and weights of each token, row and state are in
memory, few numbers beside the channels of a state.

    attend_rows    S = r V Q^T + b,  P = softmax(S),  out = P V
    attend_pull    S again,  dS from P and G V^T,  out = P G + r dS Q - c V,  dq = dS r V

For a score all tokens share the query: a product of a tile of tokens with a state. For G V^T
nothing is shared: a product of 16 rows and 16 states for each token. Sums over states or rows use
FMA: a program has the sums of a token in registers and reads each state or gradient once.
"""

import torch
import triton
import triton.language as tl

from .attend import relu, slot
from .common import (
    STAGES,
    dot,
    even_programs,
    multiprocessors,
    progressions,
    rounded,
    weight_dot,
)
from .launch import call, cdiv, launcher, next_power_of_2
from .mix_rows import ROWS, sum_into
from .sums import Sum, sum_partials

SUMS = 8192
"""Sums of a token that a program has: of 8 states or rows 1,024 channels, of 16 half as many."""
SIDE = tl.constexpr(16)
"""Rows and states of a product of one token."""


def varying(*names: str):
    """`triton.jit` for a kernel with numbers that change from launch to launch: no compiled variant
    depends on them."""
    return triton.jit(do_not_specialize=names)


@triton.jit
def split_2(b_x):
    """An fp32 number as two bf16 numbers, its upper half and the rest: 16 of its bits."""
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # The rest of an infinite number would be NaN.
    b_low = tl.where(b_x == b_high, 0.0, b_x - b_high)
    return b_high.to(tl.bfloat16), rounded(b_low, tl.bfloat16)


@varying("T", "R", "K", "L", "first_k", "step_k", "first_row", "step_row")
def attend_scores_kernel(
    p_states, p_query, p_bias, p_rstd, p_scores,
    T, R, first_k, step_k, K, first_row, step_row, L,
    s_n, s_state,
    RELU: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """S of a state and BT tokens for BL rows, in a table (T, K, L); with RELU the weights."""
    # Programs of one tile and further rows run side by side, and read it from the L2 cache.
    groups, j = tl.cdiv(L, BL), tl.program_id(1)
    k = slot(first_k, j, step_k)
    o_t = (tl.program_id(0) // groups).to(tl.int64) * BT + tl.arange(0, BT)
    o_l = tl.program_id(0) % groups * BL + tl.arange(0, BL)
    o_q, m_t, m_l = slot(first_row, o_l, step_row), o_t < T, o_l < L
    p_v, p_q = p_states + k * s_n + o_t[:, None] * s_state, p_query + o_q[None, :] * D
    b_s = tl.zeros((BT, BL), dtype=tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        o_d = start + tl.arange(0, BD)
        m_d = o_d < D
        b_v = tl.load(p_v + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_q = tl.load(p_q + o_d[:, None], mask=m_d[:, None] & m_l[None, :], other=0.0)
        if p_states.dtype.element_ty == tl.bfloat16:
            b_high, b_low = split_2(b_q)
            b_s = dot(b_v, b_high, dot(b_v, b_low, b_s))
        else:
            b_s = dot(b_v.to(tl.float32), b_q, b_s)
    b_s *= tl.load(p_rstd + k * T + o_t, mask=m_t, other=0.0)[:, None]
    if p_bias is not None:
        b_s += tl.load(p_bias + o_q * R + k, mask=m_l, other=0.0)[None, :]
    if RELU:
        b_s = relu(b_s)
    o_s = (o_t[:, None] * K + j) * L + o_l[None, :]
    tl.store(p_scores + o_s, b_s, mask=m_t[:, None] & m_l[None, :])


@varying("T", "K", "L", "first_out", "step_out")
def attend_softmax_kernel(
    p_scores, p_stats, p_kept,
    T, K, L, first_out, step_out,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weights in place of the scores, (T, K, L), and each row's statistics. With ``p_kept``,
    (T, L), there was a sum before: this is its factor."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_t, o_l, o_k = o_r // L, o_r % L, tl.arange(0, BK)
    m_r = o_t < T
    p_s = p_scores + (o_t * K * L + o_l)[:, None] + o_k[None, :] * L
    m_s = m_r[:, None] & (o_k < K)[None, :]
    b_s = tl.load(p_s, mask=m_s, other=float("-inf"))
    b_most = tl.max(b_s, axis=1)
    p_stat = p_stats + slot(first_out, o_l, step_out) * 2 * T + o_t
    if p_kept is not None:
        # Both before the sum below, for which warps wait: the stores replace them.
        b_before = tl.load(p_stat, mask=m_r, other=float("-inf"))
        b_kept = tl.load(p_stat + T, mask=m_r, other=0.0)
        b_most = tl.maximum(b_most, b_before)
    # The difference of two scores of -inf is NaN, but their weights must be 0.
    b_from = tl.where(b_most == float("-inf"), 0.0, b_most)
    b_p = tl.exp(b_s - b_from[:, None])
    b_total = tl.sum(b_p, axis=1)
    if p_kept is not None:
        b_kept *= tl.exp(b_before - b_from)
        b_total += b_kept
    b_divisor = tl.where(b_total == 0, 1.0, b_total)
    tl.store(p_s, b_p / b_divisor[:, None], mask=m_s)
    tl.store(p_stat, b_most, mask=m_r)
    tl.store(p_stat + T, b_total, mask=m_r)
    if p_kept is not None:
        tl.store(p_kept + o_r, b_kept / b_divisor, mask=m_r)


@varying("K", "L", "first_k", "step_k", "first_out", "step_out")
def attend_values_kernel(
    p_states, p_weights, p_kept, p_out,
    K, L, first_k, step_k, first_out, step_out,
    s_n, s_state, s_out, s_row,
    ACCUMULATE: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """P V of a token, BL rows and BD channels."""
    t = tl.program_id(0).to(tl.int64)
    o_l = tl.program_id(1) * BL + tl.arange(0, BL)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_l, m_d = o_l < L, o_d < D
    p_x = p_out + slot(first_out, o_l, step_out)[:, None] * s_out + t * s_row + o_d[None, :]
    m = m_l[:, None] & m_d[None, :]
    b_x = tl.zeros((BL, BD), dtype=tl.float32)
    if ACCUMULATE:
        b_x += tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        if p_kept is not None:
            b_x *= tl.load(p_kept + t * L + o_l, mask=m_l, other=0.0)[:, None]
    p_states += t * s_state
    p_weights += t * K * L
    for j in tl.range(0, K, num_stages=STAGES):
        p_v = p_states + slot(first_k, j, step_k) * s_n
        b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_p = tl.load(p_weights + j * L + o_l, mask=m_l, other=0.0)
        b_x += b_p[:, None] * b_v[None, :]
    tl.store(p_x, rounded(b_x, p_out.dtype.element_ty), mask=m)


@varying("T", "R", "K", "L", "first_k", "step_k", "first_row", "step_row", "first_slot",
         "step_slot")  # fmt: skip
def attend_slopes_kernel(
    p_grads, p_states, p_bias, p_scores, p_stats, p_ds, p_back,
    T, R, first_slot, step_slot, first_row, step_row, L, first_k, step_k, K,
    s_grads, s_grad, s_n, s_state,
    RELU: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From a token's scores without a bias, (T, K, L): P in their place, dS, (T, L, K), and the
    sums of dS S over the rows, (T, K)."""
    t = tl.program_id(0).to(tl.int64)
    o_k, o_i = tl.arange(0, SIDE), tl.arange(0, SIDE)
    m_k, k = o_k < K, slot(first_k, o_k, step_k)
    p_v = p_states + k[None, :] * s_n + t * s_state
    b_back = tl.zeros((SIDE,), dtype=tl.float32)
    for start in range(0, L, SIDE):
        o_l = start + o_i
        m_l, row = o_l < L, slot(first_row, o_l, step_row)
        m = m_l[:, None] & m_k[None, :]
        p_g = p_grads + slot(first_slot, o_l, step_slot)[:, None] * s_grads + t * s_grad
        b_slope = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for first in tl.range(0, D, BD, num_stages=STAGES):
            o_d = first + tl.arange(0, BD)
            m_d = o_d < D
            b_g = tl.load(p_g + o_d[None, :], mask=m_l[:, None] & m_d[None, :], other=0.0)
            b_v = tl.load(p_v + o_d[:, None], mask=m_d[:, None] & m_k[None, :], other=0.0)
            b_slope = dot(b_g, b_v, b_slope)
        p_s = p_scores + (t * K + o_k[None, :]) * L + o_l[:, None]
        b_dot = tl.load(p_s, mask=m, other=0.0)
        b_s = b_dot
        if p_bias is not None:
            b_s += tl.load(p_bias + row[:, None] * R + k[None, :], mask=m, other=0.0)
        if RELU:
            b_p = relu(b_s)
            b_ds = tl.where(b_s > 0, b_slope, 0.0)
        else:
            p_row = p_stats + row * 3 * T + t
            b_most = tl.load(p_row, mask=m_l, other=0.0)[:, None]
            b_total = tl.load(p_row + T, mask=m_l, other=1.0)[:, None]
            b_delta = tl.load(p_row + 2 * T, mask=m_l, other=0.0)[:, None]
            b_p = tl.exp(b_s - b_most) / b_total
            b_ds = b_p * (b_slope - b_delta)
        b_back += tl.sum(tl.where(m, b_ds * b_dot, 0.0), axis=0)
        tl.store(p_s, b_p, mask=m)
        tl.store(p_ds + (t * L + o_l[:, None]) * K + o_k[None, :], b_ds, mask=m)
    tl.store(p_back + t * K + o_k, b_back, mask=m_k)


@varying("T", "K", "L", "first_k", "step_k", "first_row", "step_row", "first_slot", "step_slot",
         "first_out", "step_out")  # fmt: skip
def attend_pull_kernel(
    p_grads, p_states, p_query, p_rstd, p_weights, p_ds, p_back, p_out,
    T, first_slot, step_slot, first_row, step_row, L, first_k, step_k, K, first_out, step_out,
    s_grads, s_grad, s_n, s_state, s_out, s_row,
    ACCUMULATE: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """P G + r dS Q - c V of a token, BK states and BD channels."""
    t = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_k, m_d, k = o_k < K, o_d < D, slot(first_k, o_k, step_k)
    m = m_k[:, None] & m_d[None, :]
    b_r = tl.load(p_rstd + k * T + t, mask=m_k, other=0.0)
    b_u = tl.zeros((BK, BD), dtype=tl.float32)
    p_grads += t * s_grad
    p_weights += t * L * K
    p_ds += t * L * K
    for i in tl.range(0, L, num_stages=STAGES):
        p_g = p_grads + slot(first_slot, i, step_slot) * s_grads
        b_g = tl.load(p_g + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_p = tl.load(p_weights + o_k * L + i, mask=m_k, other=0.0)
        b_c = tl.load(p_ds + i * K + o_k, mask=m_k, other=0.0) * b_r
        b_q = tl.zeros((BD,), dtype=tl.float32)
        if i < L:  # Programs beside this one read the same queries, from the L1 cache.
            b_q = tl.load(p_query + slot(first_row, i, step_row) * D + o_d, mask=m_d, other=0.0)
        b_u += b_p[:, None] * b_g[None, :] + b_c[:, None] * b_q[None, :]
    b_c = b_r * b_r * tl.load(p_back + t * K + o_k, mask=m_k, other=0.0) / D
    p_v = p_states + k[:, None] * s_n + t * s_state + o_d[None, :]
    b_u -= b_c[:, None] * tl.load(p_v, mask=m, other=0.0).to(tl.float32)
    p_u = p_out + slot(first_out, o_k, step_out)[:, None] * s_out + t * s_row + o_d[None, :]
    if ACCUMULATE:
        b_u += tl.load(p_u, mask=m, other=0.0).to(tl.float32)
    tl.store(p_u, rounded(b_u, p_out.dtype.element_ty), mask=m)


@varying("T", "K", "L", "first_k", "step_k")
def attend_query_kernel(
    p_ds, p_states, p_rstd, p_dquery, p_dbias,
    T, first_k, step_k, K, L,
    s_n, s_state,
    D: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dS r V of BL rows and BD channels, and the sums of dS, over the tokens of a program."""
    chunk = tl.program_id(2).to(tl.int64)
    o_l, o_t = tl.program_id(1) * BL + tl.arange(0, BL), tl.arange(0, BT)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    o_k, m_l, m_d = tl.arange(0, BK)[None, :], o_l < L, o_d < D
    b_dq = tl.zeros((BL, BD), dtype=tl.float32)
    b_db = tl.zeros((BL, BK), dtype=tl.float32)
    tiles = tl.cdiv(T - tl.program_id(2) * BT, tl.num_programs(2) * BT)
    for i in tl.range(0, tiles * K, num_stages=STAGES):
        j, tile = i % K, i // K * tl.num_programs(2) + tl.program_id(2)
        k, first = slot(first_k, j, step_k), tile.to(tl.int64) * BT
        m_t = first + o_t < T
        p_v = p_states + k * s_n + first * s_state + (o_t[:, None] * s_state + o_d[None, :])
        b_v = tl.load(p_v, mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_r = tl.load(p_rstd + k * T + first + o_t, mask=m_t, other=0.0)
        p_tile = p_ds + (first * L * K + j) + (o_t[None, :] * L + o_l[:, None]) * K
        b_ds = tl.load(p_tile, mask=m_t[None, :] & m_l[:, None], other=0.0)
        b_dq = weight_dot(b_ds * b_r[None, :], b_v, b_dq)
        if p_dbias is not None:
            b_db += tl.where(o_k == j, tl.sum(b_ds, axis=1)[:, None], 0.0)
    o_dq = (chunk * L + o_l[:, None]) * D + o_d[None, :]
    tl.store(p_dquery + o_dq, b_dq, mask=m_l[:, None] & m_d[None, :])
    if p_dbias is not None:
        # All tiles of channels have the same sums; the first one stores them.
        stored = tl.where(tl.program_id(0) == 0, K, 0)
        o_db = (chunk * L + o_l[:, None]) * K + o_k
        tl.store(p_dbias + o_db, b_db, mask=m_l[:, None] & (o_k < stored))


def scores(a, bias, rows, L, sources, K, RELU):
    """S of L rows and K states, (T, K, L) fp32."""
    _, T, D = a.states.shape
    table = a.query.new_empty(T, K, L)
    sides = {"BT": 64, "BL": min(64, max(16, next_power_of_2(L))), "BD": 64}
    if a.states.dtype != torch.bfloat16:  # FMA, whose operands are in registers.
        sides = {"BT": 32, "BL": 16, "BD": 32}
    if K > 0 and L > 0:
        call(
            attend_scores_kernel, (cdiv(T, sides["BT"]) * cdiv(L, sides["BL"]), K),
            a.states, a.query, bias, a.source_rstd, table,
            T, a.query.shape[0], *sources, K, *rows, L, a.states.stride(0), a.states.stride(1),
            RELU=RELU, D=D, **sides, num_warps=4,
        )  # fmt: skip
    return table


def sums(states, count):
    """For ``count`` sums of each token: how many of them a program has, the grid, the options."""
    _, T, D = states.shape
    B = 8 if count <= 8 else 16
    BD = min(SUMS // B, max(16, next_power_of_2(D)))
    num_warps = max(1, B * BD * states.element_size() // 4096)
    return B, (T, cdiv(count, B), cdiv(D, BD)), {"D": D, "BD": BD, "num_warps": num_warps}


@launcher
def attend_rows(a):
    T = a.states.shape[1]
    strides = a.states.stride(0), a.states.stride(1), a.out.stride(0), a.out.stride(1)
    for L, row, place in progressions(a.rows, a.out_rows, limit=ROWS):
        for i, (K, k) in enumerate(progressions(a.sources, limit=len(a.sources))):
            accumulate, kept = a.accumulate or i > 0, None
            weights = scores(a, a.bias, row, L, k, K, a.kind == "relu")
            if a.kind != "relu":
                kept = a.query.new_empty(T, L) if accumulate else None
                BK = next_power_of_2(max(1, K))
                BR = max(1, 4096 // BK)
                call(
                    attend_softmax_kernel, (cdiv(T * L, BR),), weights, a.out_stats, kept,
                    T, K, L, *place, BR=BR, BK=BK, num_warps=4,
                )  # fmt: skip
            BL, grid, options = sums(a.states, L)
            call(
                attend_values_kernel, grid, a.states, weights, kept, a.out, K, L, *k, *place,
                *strides, ACCUMULATE=accumulate, BL=BL, **options,
            )  # fmt: skip


@launcher
def attend_pull(a):
    _, T, D = a.states.shape
    of_grads, of_states = a.grads.stride()[:2], a.states.stride()[:2]
    for K, k, place in progressions(a.sources, a.out_rows, limit=ROWS):
        pieces = progressions(a.rows, a.grad_slots, limit=max(1, len(a.rows)))
        for i, (L, row, slots) in enumerate(pieces):
            weights = scores(a, None, row, L, k, K, False)
            ds, back = a.query.new_empty(T, L, K), a.query.new_empty(T, K)
            call(
                attend_slopes_kernel, (T,),
                a.grads, a.states, a.bias, weights, a.stats, ds, back,
                T, a.query.shape[0], *slots, *row, L, *k, K, *of_grads, *of_states,
                RELU=a.kind == "relu", D=D, BD=128 // a.states.element_size(), num_warps=1,
            )  # fmt: skip
            BK, grid, options = sums(a.states, K)
            call(
                attend_pull_kernel, grid,
                a.grads, a.states, a.query, a.source_rstd, weights, ds, back, a.out,
                T, *slots, *row, L, *k, K, *place,
                *of_grads, *of_states, a.out.stride(0), a.out.stride(1),
                ACCUMULATE=a.accumulate or i > 0, BK=BK, **options,
            )  # fmt: skip
            if a.dquery is not None and L > 0:
                query_grads(ds, a, k, range(row[0], row[0] + L * row[1], row[1]))


def query_grads(ds, a, sources, rows, sums=None, outs=()):
    """``dquery[l] += sum ds_lk n_k`` and ``dbias[l, k] = sum ds_lk`` for all ``rows`` l.

    Args:
        ds: (T, L, K) fp32, contiguous.
        a: the record of the launch, of which it takes the states and the results.
        sources: (first, step) of the K states.
        sums, outs: what `sum_partials` gets besides; one launch computes both.
    """
    T, L, K = ds.shape
    D = a.states.shape[2]
    sides = {"BL": 16, "BT": 16, "BD": 128, "BK": next_power_of_2(K)}
    grid = cdiv(D, sides["BD"]), cdiv(L, sides["BL"])
    most = max(1, 4 * multiprocessors(a.states.device) // (grid[0] * grid[1]))
    chunks = even_programs(cdiv(T, sides["BT"]), most)
    dq = ds.new_empty(chunks, 1, L, D)
    db = None if a.dbias is None else ds.new_empty(chunks, 1, L, K)
    call(
        attend_query_kernel, (*grid, chunks),
        ds, a.states, a.source_rstd, dq, db, T, *sources, K, L, a.states.stride(0),
        a.states.stride(1),
        D=D, **sides, num_warps=4,
    )  # fmt: skip
    start = 0
    for count, (first, step) in progressions(rows, limit=len(rows)):
        part = slice(start, start + count)
        of_rows = a.dquery[first : first + count * step : step]
        if sums is None:
            sum_partials(dq[:, :, part], of_rows, add=True)
        else:
            sum_partials(sums, *outs, more=Sum(dq[:, 0, part], of_rows, add=True))
            sums = None
        if db is not None:
            sum_into(db[:, :, part], a.dbias, count, (first, step), K, sources)
        start += count
