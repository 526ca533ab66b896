"""The far passes of attention residuals, of which `attend` has the equations.

    attend_rows    out_b = sum_k p_lk v_k for up to 16 rows l, with each row's softmax statistics
    attend_pull    out_j = what later rows l add to dv_j,  dq_l,  db_lj

The kernels of `attend_dot` take bf16 rows of up to 1,024 channels. Here a program holds the sums of
its rows, and their queries, in registers, for one token or a few. It reads each state once for each
of its rows, from DRAM the first time and then from the L1 cache. Programs that hold further rows of
the same tokens run side by side, and read the state from the L2 cache. In attend_pull the program
holds states and reads rows. All products use FMA, for each channel of a pair of row and state two
in attend_rows and four in attend_pull, which takes longer than the reads from DRAM.

attend_pull also stores ds of each token, row and state, in fp32. A second kernel multiplies these
with the states, for dq; it reads the states once more.
"""

import torch
import triton
import triton.language as tl

from .attend import (
    begin_sum,
    end_pull,
    end_sum,
    join_states,
    load_query,
    no_sum,
    pull_rows,
    slot,
    tile_rows,
)
from .attend_dot import (
    MOST_CHANNELS,
    PULL_SIZES,
    PULLED_CHANNELS,
    ROW_SIZES,
    attend_pull_dot_kernel,
    attend_rows_dot_kernel,
    dot_tile,
)
from .common import (
    RowTile,
    dot,
    dot_weight,
    even_programs,
    multiprocessors,
    progressions,
    residency,
    row_tile,
    store_rows,
)
from .launch import call, cdiv, launcher, next_power_of_2
from .mix_rows import ROWS, sum_into
from .sums import Sum, sum_partials


def attend_tile(D: int, itemsize: int, num_warps: int) -> RowTile:
    """16 elements of each operand per thread, so that a row of 512 channels is a warp's."""
    return row_tile(D, itemsize, per_thread=16, num_warps=num_warps)


@triton.jit(do_not_specialize=ROW_SIZES)
def attend_rows_kernel(
    p_states, p_query, p_bias, p_rstd, p_out, p_stats,
    T, R, first_k, step_k, K, first_row, step_row, rows, first_out, step_out,
    s_n, s_state, s_out, s_row,
    RELU: tl.constexpr, ACCUMULATE: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    groups, tokens = tl.cdiv(rows, BB), BT // BB
    skipped = tl.program_id(0) % groups * BB
    first_row, rows = first_row + skipped * step_row, rows - skipped
    first_out += skipped * step_out
    b_q = load_query(p_query, first_row, step_row, rows, D, BA, BT, BC, BB)
    o_b, o_t, o_d = tile_rows(0, BA, BT, BC, BB)
    p_out += slot(first_out, o_b, step_out) * s_out + o_d
    m_out = (o_b < rows) & (o_d < D)
    o_sb = tl.arange(0, BT)
    p_stat = None
    if not RELU:
        p_stat = p_stats + slot(first_out, o_sb % BB, step_out) * 2 * T
    first = tl.program_id(0) // groups * tokens
    for begin in range(first, T, tl.num_programs(0) // groups * tokens):
        o_tile = (begin + o_t).to(tl.int64)
        m, p_tile = m_out & (o_tile < T), p_out + o_tile * s_row
        o_st = (begin + o_sb // BB).to(tl.int64)
        m_st = (o_st < T) & (o_sb % BB < rows)
        b_x, b_most, b_total = no_sum(BA, BT, BC)
        if ACCUMULATE:
            b_x = tl.reshape(tl.load(p_tile, mask=m, other=0.0).to(tl.float32), (BA, BT, BC))
            if not RELU:
                b_x, b_most, b_total = begin_sum(b_x, p_stat, p_stat + T, o_st, m_st)
        b_x, b_most, b_total = join_states(
            b_x, b_most, b_total, b_q, p_states, p_bias, p_rstd, first_row, step_row, rows,
            first_k, step_k, K, T, R, begin, s_n, s_state, RELU, D, BA, BT, BC, BB,
        )  # fmt: skip
        store_rows(p_tile, end_sum(b_x, b_total, RELU), m, BA, BT, BC)
        if not RELU:
            tl.store(p_stat + o_st, tl.reshape(b_most, (BT,)), mask=m_st)
            tl.store(p_stat + T + o_st, tl.reshape(b_total, (BT,)), mask=m_st)


@triton.jit(do_not_specialize=PULL_SIZES)
def attend_pull_kernel(
    p_grads, p_states, p_query, p_bias, p_rstd, p_stats, p_out, p_ds,
    T, R, first_slot, step_slot, first_row, step_row, rows, first_k, step_k, K, first_out, step_out,
    s_grads, s_grad, s_n, s_state, s_out, s_row,
    RELU: tl.constexpr, ACCUMULATE: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(K, BB)
    skipped = tl.program_id(0) % groups * BB
    first_k, first_out, left = (
        first_k + skipped * step_k,
        first_out + skipped * step_out,
        K - skipped,
    )
    begin = tl.program_id(0) // groups * (BT // BB)
    o_b, o_t, o_d = tile_rows(begin, BA, BT, BC, BB)
    m, o_t = (o_b < left) & (o_t < T) & (o_d < D), o_t.to(tl.int64)
    p_v = p_states + slot(first_k, o_b, step_k) * s_n + o_t * s_state + o_d
    b_v = tl.reshape(tl.load(p_v, mask=m, other=0.0).to(tl.float32), (BA, BT, BC))
    o_sb = tl.arange(0, BT)[None, :, None]
    o_st = begin + o_sb // BB
    p_r = p_rstd + slot(first_k, o_sb % BB, step_k) * T + o_st
    b_r = tl.load(p_r, mask=(o_st < T) & (o_sb % BB < left), other=0.0)
    p_out += slot(first_out, o_b, step_out) * s_out + o_t * s_row + o_d
    b_u = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_back = tl.zeros((1, BT, 1), dtype=tl.float32)
    if p_ds is not None:
        p_ds += skipped
    b_u, b_back = pull_rows(
        b_u, b_back, b_v, b_r, p_grads, p_query, p_bias, p_stats, p_ds, first_row, step_row,
        first_slot, step_slot, rows, first_k, step_k, left, rows, K, T, R, begin, s_grads, s_grad,
        RELU, D, BA, BT, BC, BB,
    )  # fmt: skip
    b_u = end_pull(b_u, b_back, b_v, b_r, D)
    if ACCUMULATE:
        b_u += tl.reshape(tl.load(p_out, mask=m, other=0.0).to(tl.float32), (BA, BT, BC))
    store_rows(p_out, b_u, m, BA, BT, BC)


@triton.jit(do_not_specialize=["T", "first_k", "step_k", "K", "L"])
def attend_query_kernel(
    p_ds, p_states, p_rstd, p_dquery, p_dbias,
    T, first_k, step_k, K, L,
    s_n, s_state,
    D: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(2).to(tl.int64)
    o_l = (tl.program_id(1) * BL + tl.arange(0, BL)).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    o_k, m_l, m_d = tl.arange(0, BK)[None, :], o_l < L, o_d < D
    b_dq = tl.zeros((BD, BL), dtype=tl.float32)
    b_db = tl.zeros((BL, BK), dtype=tl.float32)
    for begin in range(tl.program_id(2) * BT, T, tl.num_programs(2) * BT):
        o_t = (begin + tl.arange(0, BT)).to(tl.int64)
        m_t = o_t < T
        for j in range(K):
            k = slot(first_k, j, step_k)
            o_ds = (o_t[:, None] * L + o_l[None, :]) * K + j
            b_ds = tl.load(p_ds + o_ds, mask=m_t[:, None] & m_l[None, :], other=0.0)  # (BT, BL)
            b_r = tl.load(p_rstd + k * T + o_t, mask=m_t, other=0.0)
            p_v = p_states + k * s_n + o_t[:, None] * s_state + o_d[None, :]
            b_v = tl.load(p_v, mask=m_t[:, None] & m_d[None, :], other=0.0)
            b_c = b_ds * b_r[:, None]
            if p_states.dtype.element_ty == tl.bfloat16:
                b_dq = dot_weight(tl.trans(b_v), b_c, b_dq)
            else:
                b_dq = dot(tl.trans(b_v.to(tl.float32)), b_c, b_dq)
            if p_dbias is not None:
                b_db += tl.where(o_k == j, tl.sum(b_ds, axis=0)[:, None], 0.0)
    o_dq = (chunk * L + o_l[None, :]) * D + o_d[:, None]
    tl.store(p_dquery + o_dq, b_dq, mask=m_d[:, None] & m_l[None, :])
    if p_dbias is not None:
        # All tiles of channels have the same sums; the first one stores them.
        stored = tl.where(tl.program_id(0) == 0, K, 0)
        o_db = (chunk * L + o_l[:, None]) * K + o_k
        tl.store(p_dbias + o_db, b_db, mask=m_l[:, None] & (o_k < stored))


@launcher
def attend_rows(a):
    _, T, D = a.states.shape
    tile, programs = dot_tile(a.states, MOST_CHANNELS), multiprocessors(a.states.device)
    if tile is None:
        kernel, whole = attend_rows_kernel, attend_tile(D, a.states.element_size(), 8)
        tile = whole._asdict()
    else:
        kernel, whole = attend_rows_dot_kernel, None
    resident = residency(16, tile["num_warps"])
    for count, row, place in progressions(a.rows, a.out_rows, limit=ROWS):
        sides, groups, tiles = tile, 1, T
        if whole is not None:
            BB = min(whole.BT, next_power_of_2(count))
            sides = {"BB": BB, **tile}
            groups, tiles = cdiv(count, BB), cdiv(T, whole.BT // BB)
        chunks = even_programs(tiles, resident.programs * programs)
        for i, (K, k) in enumerate(progressions(a.sources, limit=len(a.sources))):
            call(
                kernel, (groups * chunks,),
                a.states, a.query, a.bias, a.source_rstd, a.out, a.out_stats,
                T, a.query.shape[0], *k, K, *row, count, *place,
                a.states.stride(0), a.states.stride(1), a.out.stride(0), a.out.stride(1),
                RELU=a.kind == "relu", ACCUMULATE=a.accumulate or i > 0, D=D, **sides,
                maxnreg=resident.registers,
            )  # fmt: skip


@launcher
def attend_pull(a):
    _, T, D = a.states.shape
    tile = dot_tile(a.states, PULLED_CHANNELS)
    if tile is None:
        kernel, whole = attend_pull_kernel, attend_tile(D, a.states.element_size(), 8)
        tile, registers = whole._asdict(), residency(16, whole.num_warps).registers
    else:
        kernel, whole, registers = attend_pull_dot_kernel, None, None
    for K, k, place in progressions(a.sources, a.out_rows, limit=ROWS):
        sides = tile
        if whole is None:
            programs = residency(8, tile["num_warps"]).programs * multiprocessors(a.states.device)
            grid = (even_programs(T, programs),)
        else:
            BB = min(whole.BT, next_power_of_2(K))
            sides = {"BB": BB, **tile}
            grid = (cdiv(K, BB) * cdiv(T, whole.BT // BB),)
        for i, (L, row, first_slot) in enumerate(
            progressions(a.rows, a.grad_slots, limit=max(1, len(a.rows)))
        ):
            ds = None if a.dquery is None else a.query.new_empty(T, L, K)
            call(
                kernel, grid,
                a.grads, a.states, a.query, a.bias, a.source_rstd, a.stats, a.out, ds,
                T, a.query.shape[0], *first_slot, *row, L, *k, K, *place,
                a.grads.stride(0), a.grads.stride(1), a.states.stride(0), a.states.stride(1),
                a.out.stride(0), a.out.stride(1),
                RELU=a.kind == "relu", ACCUMULATE=a.accumulate or i > 0, D=D, **sides,
                maxnreg=registers,
            )  # fmt: skip
            if ds is not None and L > 0:
                later = range(row[0], row[0] + L * row[1], row[1])
                query_grads(ds, a, k, later)


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
    sides = {"BL": 16, "BT": 16, "BD": 64, "BK": next_power_of_2(K)}
    if a.states.dtype == torch.bfloat16:
        sides |= {"BL": 16 if L <= 16 else 32, "BT": 32}
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
