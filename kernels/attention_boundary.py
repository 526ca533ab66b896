"""The boundary between two layers with attention residuals, of which `attend` has the equations.

    forward    y = residual + dropout(branch), stored in slot k, and r_k
               x = partial joined to the near states,  out = LN(x)
    backward   g = dx + the gradient of dout through LN, stored for the boundaries below
               delta_k = <g, x>,  dy = pulled + what the rows of k's block add to dv_k

`boundary` has the same with constant weights. As there, the near states but k, and the pulled rows
and slots but row k's, are arithmetic progressions. For the gradients of the queries backward stores
ds of each token and row, and `attend_query_kernel` reads state k again.
"""

import triton
import triton.language as tl

from .attend import end_sum, join, no_sum, pull, slot
from .attend_rows import query_grads
from .common import (
    STAGES,
    dropout,
    even_programs,
    flat_rows,
    inverse_rms,
    load_again,
    load_rows,
    load_stat,
    multiprocessors,
    output_backward,
    passed_near,
    passed_pulls,
    residency,
    rounded,
    row_channels,
    row_sum,
    row_tile,
    store_output,
    store_rows,
    store_stat,
    store_sum,
    store_tile,
)
from .launch import cdiv, launch, launcher
from .sums import sum_partials

PER_THREAD = 16
"""Elements of each operand, so that a row of 512 channels is a warp's."""
FORWARD_NUMBERS = ["T", "threshold", "k", "first", "step", "count"]
BACKWARD_NUMBERS = [
    *FORWARD_NUMBERS,
    *("grad_slot", "first_row", "row_step", "first_slot", "slot_step", "pulls"),
]
# Each state has its entry in a table of all layers, which begins anywhere.
ENTRIES = ["p_seed", "p_partial_stats", "p_out_mean", "p_out_rstd"]


@triton.jit
def _add_state(b_x, b_most, b_total, b_v, b_q, b_r, p_bias, row, k, R, RELU: tl.constexpr):
    """`join` of state k to the sum of a row."""
    b_s = row_sum(b_v * b_q) * b_r
    if p_bias is not None:
        b_s += tl.load(p_bias + row * R + k)
    return join(b_x, b_most, b_total, b_s, b_v, RELU)


@triton.jit
def _far_and_near(
    b_q, p_states, p_bias, p_partial, p_partial_stats, p_rstd, row, first, step, count, T, R,
    s_states, s1_states, s_partial, o_t, o_row, o_d, m_t, m,
    RELU: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sum of a row over ``partial``, a weighted mean, and the near states but its own."""
    b_x, b_most, b_total = no_sum(BA, BT, BC)
    if p_partial is not None:
        b_x = load_rows(p_partial + o_row * s_partial + o_d, m, BA, BT, BC).to(tl.float32)
        if not RELU:
            b_most = load_stat(p_partial_stats, o_t, m_t)
            b_total = load_stat(p_partial_stats + T, o_t, m_t)
            b_x *= b_total
    p_states += o_row * s1_states + o_d
    for i in tl.range(0, count, num_stages=STAGES):
        k = slot(first, i, step)
        b_v = load_rows(p_states + k * s_states, m, BA, BT, BC).to(tl.float32)
        b_r = load_stat(p_rstd + k * T, o_t, m_t)
        b_x, b_most, b_total = _add_state(
            b_x, b_most, b_total, b_v, b_q, b_r, p_bias, row, k, R, RELU
        )
    return b_x, b_most, b_total


@triton.jit(do_not_specialize=FORWARD_NUMBERS, do_not_specialize_on_alignment=ENTRIES)
def attention_boundary_fwd_kernel(
    p_branch, p_residual, p_seed, p_states, p_query, p_bias, p_partial, p_partial_stats,
    p_out_norm_weight, p_out_norm_bias, p_x, p_out, p_rstd, p_stats, p_out_mean, p_out_rstd,
    T, R, k, first, step, count, eps, out_eps, threshold, scale,
    s_branch, s_residual, s_states, s1_states, s_partial, s_x, s_out,
    RELU: tl.constexpr, OUT_RMS: tl.constexpr, READS_OWN: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BT
    o_t = begin + tl.arange(0, BT)
    m_t, m_c = o_t < T, row_channels(BA, BC) < D
    o_row, o_d, m = flat_rows(begin, T, D, BA, BT, BC)
    k = k.to(tl.int64)
    p_own, p_own_rstd = p_states + k * s_states, p_rstd + k * T
    # Loaded now, so that they arrive while the near states are summed.
    if p_branch is not None:
        b_y = load_rows(p_branch + o_row * s_branch + o_d, m, BA, BT, BC)
        if p_residual is not None:
            b_r = load_rows(p_residual + o_row * s_residual + o_d, m, BA, BT, BC)
    b_q = load_rows(p_query + k * D + o_d, o_d < D, BA, BT, BC)
    b_x, b_most, b_total = _far_and_near(
        b_q, p_states, p_bias, p_partial, p_partial_stats, p_rstd, k, first, step, count, T, R,
        s_states, s1_states, s_partial, o_t, o_row, o_d, m_t, m, RELU, BA, BT, BC,
    )  # fmt: skip
    if p_branch is not None:
        b_y = dropout(b_y.to(tl.float32), p_seed, o_t, threshold, scale, BA, BT, BC)
        if p_residual is not None:
            b_y += b_r.to(tl.float32)
        # Mixes the rounded state, which is what later rows read.
        b_y = rounded(b_y, p_states.dtype.element_ty)
        store_rows(p_own + o_row * s1_states + o_d, b_y, m, BA, BT, BC)
        b_v = b_y.to(tl.float32)
        b_rstd = inverse_rms(b_v, D, eps)
        store_stat(p_own_rstd, b_rstd, o_t, m_t)
    elif READS_OWN:
        b_v = load_rows(p_own + o_row * s1_states + o_d, m, BA, BT, BC).to(tl.float32)
        b_rstd = load_stat(p_own_rstd, o_t, m_t)
    if READS_OWN:
        b_x, b_most, b_total = _add_state(
            b_x, b_most, b_total, b_v, b_q, b_rstd, p_bias, k, k, R, RELU
        )
    if not RELU:
        store_stat(p_stats + k * 3 * T, b_most, o_t, m_t)
        store_stat(p_stats + k * 3 * T + T, b_total, o_t, m_t)
    b_x = end_sum(b_x, b_total, RELU)
    store_tile(p_x, s_x, o_row, o_d, m, b_x)
    if p_out is not None:
        store_output(
            b_x, p_out, p_out_norm_weight, p_out_norm_bias, p_out_mean, p_out_rstd, s_out,
            o_t, o_row, o_d, m_t, m_c, m, D, out_eps, OUT_RMS,
        )  # fmt: skip


@triton.jit(do_not_specialize=BACKWARD_NUMBERS, do_not_specialize_on_alignment=ENTRIES)
def attention_boundary_bwd_kernel(
    p_states, p_query, p_bias, p_partial, p_partial_stats, p_out_norm_weight, p_rstd, p_stats,
    p_out_mean, p_out_rstd, p_seed, p_dx, p_dout, p_grads, p_pulled, p_dbranch, p_dresidual,
    p_ds, p_sums,
    T, R, k, grad_slot, first, step, count, first_row, row_step, first_slot, slot_step, pulls,
    threshold, scale,
    s_states, s1_states, s_partial, s_dx, s_dout, s_grads, s1_grads, s_pulled, s_dbranch,
    s_dresidual,
    RELU: tl.constexpr, OUT_RMS: tl.constexpr, READS_OWN: tl.constexpr, PULLS_OWN: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_c = row_channels(BA, BC)
    m_c = o_c < D
    k, program = k.to(tl.int64), tl.program_id(0).to(tl.int64)
    p_g = p_grads + grad_slot.to(tl.int64) * s_grads
    # Sums over this program's tokens, and every block below: (BA, BT, BC).
    b_dweight = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_dbias = tl.zeros((BA, BT, BC), dtype=tl.float32)
    for begin in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        o_t = begin + tl.arange(0, BT)
        m_t = o_t < T
        o_row, o_d, m = flat_rows(begin, T, D, BA, BT, BC)
        b_n = load_rows(p_states + k * s_states + o_row * s1_states + o_d, m, BA, BT, BC)
        b_r = load_stat(p_rstd + k * T, o_t, m_t)
        if p_dx is not None:
            b_dx = load_rows(p_dx + o_row * s_dx + o_d, m, BA, BT, BC)
        b_q = load_rows(p_query + k * D + o_d, o_d < D, BA, BT, BC)
        b_v = b_n.to(tl.float32)
        b_g = tl.zeros((BA, BT, BC), dtype=tl.float32)
        if p_dout is not None or not RELU:
            b_x, b_most, b_total = _far_and_near(
                b_q, p_states, p_bias, p_partial, p_partial_stats, p_rstd, k, first, step, count,
                T, R, s_states, s1_states, s_partial, o_t, o_row, o_d, m_t, m, RELU, BA, BT, BC,
            )  # fmt: skip
            if READS_OWN:
                b_x, b_most, b_total = _add_state(
                    b_x, b_most, b_total, b_v, b_q, b_r, p_bias, k, k, R, RELU
                )
            b_x = end_sum(b_x, b_total, RELU)
        if p_dout is not None:
            b_mean = None if OUT_RMS else load_stat(p_out_mean, o_t, m_t)
            b_g, b_dw, b_db = output_backward(
                load_rows(p_dout + o_row * s_dout + o_d, m, BA, BT, BC), b_x, b_mean,
                load_stat(p_out_rstd, o_t, m_t), p_out_norm_weight, o_d, m_c, m, D, OUT_RMS,
            )  # fmt: skip
            if p_sums is not None:
                b_dweight += b_dw
                b_dbias += b_db
        if p_dx is not None:
            b_g += b_dx.to(tl.float32)
        # Pulls and stores the rounded gradient, which is what other states read.
        b_g = rounded(b_g, p_grads.dtype.element_ty)
        store_rows(p_g + o_row * s1_grads + o_d, b_g, m, BA, BT, BC)
        b_g = b_g.to(tl.float32)
        b_most, b_total, b_delta = 0.0, 1.0, 0.0
        if not RELU:
            p_row = p_stats + k * 3 * T
            b_most, b_total = load_stat(p_row, o_t, m_t), load_stat(p_row + T, o_t, m_t, 1.0)
            b_delta = row_sum(b_g * b_x)
            store_stat(p_row + 2 * T, b_delta, o_t, m_t)
        if p_pulled is not None:
            b_pulled = load_rows(p_pulled + o_row * s_pulled + o_d, m, BA, BT, BC)
        b_u = tl.zeros((BA, BT, BC), dtype=tl.float32)
        b_back = tl.zeros((1, BT, 1), dtype=tl.float32)
        L = pulls + PULLS_OWN
        if PULLS_OWN:
            b_bias = 0.0 if p_bias is None else tl.load(p_bias + k * R + k)
            b_u, b_back, b_ds = pull(
                b_u, b_back, b_v, b_r, b_g, b_q, b_bias, b_most, b_total, b_delta, RELU
            )
            if p_ds is not None:
                tl.store(p_ds + o_t.to(tl.int64) * L, tl.reshape(b_ds, (BT,)), mask=m_t)
        p_tile = p_grads + (o_row * s1_grads + o_d)
        for i in tl.range(0, pulls, num_stages=STAGES):
            row = slot(first_row, i, row_step)
            b_gl = load_rows(p_tile + slot(first_slot, i, slot_step) * s_grads, m, BA, BT, BC)
            b_ql = tl.zeros((BA, BT, BC), dtype=tl.float32)
            b_bias, b_most, b_total, b_delta = 0.0, 0.0, 1.0, 0.0
            if i < pulls:
                b_ql = load_again(b_ql, p_query + row * D + o_d, o_d < D)
            if p_bias is not None:
                b_bias = tl.load(p_bias + row * R + k)
            if not RELU:
                p_row = p_stats + row * 3 * T
                b_most, b_total = load_stat(p_row, o_t, m_t), load_stat(p_row + T, o_t, m_t, 1.0)
                b_delta = load_stat(p_row + 2 * T, o_t, m_t)
            b_u, b_back, b_ds = pull(
                b_u, b_back, b_v, b_r, b_gl.to(tl.float32), b_ql, b_bias, b_most, b_total, b_delta,
                RELU,
            )  # fmt: skip
            if p_ds is not None:
                p_l = p_ds + PULLS_OWN + o_t.to(tl.int64) * L + i
                tl.store(p_l, tl.reshape(b_ds, (BT,)), mask=m_t)
        # Through 1 / RMS.
        b_y = b_u - b_v * (b_r * b_r * b_back / D)
        if p_pulled is not None:
            b_y += b_pulled.to(tl.float32)
        store_tile(p_dresidual, s_dresidual, o_row, o_d, m, b_y)
        b_y = dropout(b_y, p_seed, o_t, threshold, scale, BA, BT, BC)
        store_tile(p_dbranch, s_dbranch, o_row, o_d, m, b_y)
    if p_sums is not None:
        p = p_sums + program * 2 * D + o_c
        store_sum(p, b_dweight, m_c)
        store_sum(p + D, b_dbias, m_c)


@launcher
def attention_boundary_forward(a):
    _, T, D = a.states.shape
    near = passed_near("attention_boundary", tuple(a.near), a.k)
    tile = row_tile(D, a.states.element_size(), per_thread=PER_THREAD, num_warps=8)
    launch(
        attention_boundary_fwd_kernel, (cdiv(T, tile.BT),), a, p_rstd=a.source_rstd, T=T,
        R=a.query.shape[0], **near, RELU=a.kind == "relu", D=D,
        maxnreg=residency(16, tile.num_warps)[1], **tile._asdict(),
    )  # fmt: skip


@launcher
def attention_boundary_backward(a):
    _, T, D = a.states.shape
    near = passed_near("attention_boundary", tuple(a.near), a.k)
    rows, pulls = passed_pulls("attention_boundary", tuple(a.pull_rows), tuple(a.pull_slots), a.k)
    tile = row_tile(D, a.states.element_size(), per_thread=PER_THREAD, num_warps=4)
    programs, registers = residency(8, tile.num_warps)
    programs = even_programs(cdiv(T, tile.BT), programs * multiprocessors(a.states.device))
    ds = sums = None
    if a.dquery is not None and rows:
        ds = a.query.new_empty(T, len(rows), 1)
    channels = a.dout_norm_weight, a.dout_norm_bias
    if any(d is not None for d in channels):
        sums = a.query.new_empty(programs, 2, 1, D)
    launch(
        attention_boundary_bwd_kernel, (programs,), a, p_rstd=a.source_rstd, p_ds=ds, p_sums=sums,
        T=T, R=a.query.shape[0], **near, **pulls, RELU=a.kind == "relu", D=D, maxnreg=registers,
        **tile._asdict(),
    )  # fmt: skip
    if ds is not None:
        query_grads(ds, a, (a.k, 1), rows, sums, channels)
    elif sums is not None:
        sum_partials(sums, *channels)
