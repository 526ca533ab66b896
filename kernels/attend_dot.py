"""`attend_rows` and `attend_pull` on tensor cores, for bf16 and rows of up to 1,024 channels.

For a token, 16 rows and 16 states at a time, with V the states, G the gradients and Q the queries:

    attend_rows    S = Q V^T,  x = P V                            a program holds Q and x
    attend_pull    S = V Q^T,  dP = V G^T,  dv = P G + dS r Q     a program holds V and dv

Tiles are (NC, 16, BC): channel (c, i) is channel ``c * BC + i``, and a warp has BC channels or half
of them, so only the sums of S cross warps. What is fp32, such as Q and P, enters a product as two
bf16 numbers: its upper half and the rest.
"""

import torch
import triton
import triton.language as tl

from .attend import TRITON_3_9, relu, slot
from .common import dot, rounded, shared_memory
from .launch import next_power_of_2

MOST_CHANNELS, PULLED_CHANNELS = 1024, 512
"""Of a row; of what attend_pull has in registers at a time, so that a wider row takes two turns."""
# Numbers that change from launch to launch; no compiled variant depends on them.
ROW_SIZES = [
    *("T", "R", "K", "first_k", "step_k", "rows", "first_row", "step_row", "first_out"),
    "step_out",
]
PULL_SIZES = [*ROW_SIZES, "first_slot", "step_slot"]
CHANNELS = 128 if TRITON_3_9 else 64
"""Channels of a product. Two warps share one of 128; by older compilers both would compute all."""
SIDE = tl.constexpr(16)
"""Rows and states of a tile."""


def dot_tile(states: torch.Tensor, most: int) -> dict[str, int] | None:
    """The sides of a tile of at most ``most`` channels and the warps of a program; None where the
    kernels of this file do not serve: other dtypes, wide rows, GPUs with little shared memory."""
    D = states.shape[2]
    BD = min(most, max(64, next_power_of_2(D)))
    # The queries of attend_rows and a tile of states take 128 bytes for each channel.
    if states.dtype != torch.bfloat16 or D > MOST_CHANNELS:
        return None
    if shared_memory(states.device) < 136 * BD:
        return None
    BC = min(BD, CHANNELS)
    return {"NC": BD // BC, "BC": BC, "num_warps": max(4, BD // 64)}


@triton.jit
def dot_2(b_high, b_low, b_b, b_sum):
    """``b_sum + (high + low) @ b``."""
    return dot(b_high, b_b, dot(b_low, b_b, b_sum))


@triton.jit
def split_2(b_x):
    """An fp32 number as two bf16 numbers, its upper half and the rest: 16 of its bits."""
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # The rest of an infinite number would be NaN.
    b_low = tl.where(b_x == b_high, 0.0, b_x - b_high)
    return b_high.to(tl.bfloat16), rounded(b_low, tl.bfloat16)


@triton.jit
def _wide(b_x, NC: tl.constexpr):
    """(16, 16) for each group of channels."""
    return tl.broadcast_to(b_x[None, :, :], (NC, SIDE, SIDE))


@triton.jit
def _channels(NC: tl.constexpr, BC: tl.constexpr):
    return tl.arange(0, NC)[:, None, None] * BC + tl.arange(0, BC)[None, None, :]


@triton.jit(do_not_specialize=ROW_SIZES)
def attend_rows_dot_kernel(
    p_states, p_query, p_bias, p_rstd, p_out, p_stats,
    T, R, first_k, step_k, K, first_row, step_row, rows, first_out, step_out,
    s_n, s_state, s_out, s_row,
    RELU: tl.constexpr, ACCUMULATE: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_d, o_b, o_k = _channels(NC, BC), tl.arange(0, SIDE), tl.arange(0, SIDE)
    m_b, o_q = o_b < rows, slot(first_row, o_b, step_row)
    m_row = m_b[None, :, None] & (o_d < D)
    b_high, b_low = split_2(
        tl.load(p_query + o_q[None, :, None] * D + o_d, mask=m_row, other=0.0)
    )  # fmt: skip
    o_out = slot(first_out, o_b, step_out)
    p_rows, p_stat = p_out + o_out[None, :, None] * s_out + o_d, p_stats
    if not RELU:
        p_stat = p_stats + o_out * 2 * T
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for i in range(0, tl.cdiv(T - tl.program_id(0), programs)):
        t = first + i * programs
        b_x = tl.zeros((NC, SIDE, BC), dtype=tl.float32)
        b_most = tl.full((SIDE,), float("-inf"), dtype=tl.float32)
        b_total = tl.zeros((SIDE,), dtype=tl.float32)
        if ACCUMULATE:
            b_x = tl.load(p_rows + t * s_row, mask=m_row, other=0.0).to(tl.float32)
            if not RELU:
                b_most = tl.load(p_stat + t, mask=m_b, other=float("-inf"))
                b_total = tl.load(p_stat + T + t, mask=m_b, other=0.0)
                b_x *= b_total[None, :, None]
        for start in tl.range(0, K, SIDE, num_stages=1):
            m_k, k = start + o_k < K, slot(first_k, start + o_k, step_k)
            b_r = tl.load(p_rstd + k * T + t, mask=m_k, other=0.0)[None, :]
            p_v = p_states + k[None, :, None] * s_n + t * s_state + o_d
            b_v = tl.load(p_v, mask=m_k[None, :, None] & (o_d < D), other=0.0)
            b_zero = tl.zeros((NC, SIDE, SIDE), dtype=tl.float32)
            b_s = tl.sum(dot_2(b_high, b_low, tl.permute(b_v, (0, 2, 1)), b_zero), axis=0)
            b_s *= b_r
            if p_bias is not None:
                o_bias = o_q.to(tl.int32)[:, None] * R + k.to(tl.int32)[None, :]
                b_s += tl.load(p_bias + o_bias, mask=m_b[:, None] & m_k[None, :], other=0.0)
            b_s = tl.where(m_k[None, :], b_s, float("-inf"))
            if RELU:
                b_p = relu(b_s)
            else:
                b_new = tl.maximum(b_most, tl.max(b_s, axis=1))
                # The difference of two scores of -inf is NaN, but their weights must be 0.
                b_from = tl.where(b_new == float("-inf"), 0.0, b_new)
                b_kept, b_p = tl.exp(b_most - b_from), tl.exp(b_s - b_from[:, None])
                b_x *= b_kept[None, :, None]
                b_total, b_most = b_total * b_kept + tl.sum(b_p, axis=1), b_new
            b_ph, b_pl = split_2(b_p)
            b_x = dot_2(_wide(b_ph, NC), _wide(b_pl, NC), b_v, b_x)
        if not RELU:
            b_x /= tl.where(b_total == 0, 1.0, b_total)[None, :, None]
            tl.store(p_stat + t, b_most, mask=m_b)
            tl.store(p_stat + T + t, b_total, mask=m_b)
        tl.store(p_rows + t * s_row, rounded(b_x, p_out.dtype.element_ty), mask=m_row)


@triton.jit
def _pull_scores(b_dot, b_slope, p_v, p_g, p_q, m_state, m_row, NC: tl.constexpr):
    """Adds ``V Q^T`` and ``V G^T`` over the channels of a tile."""
    b_g = tl.load(p_g, mask=m_row, other=0.0)
    b_v = tl.load(p_v, mask=m_state, other=0.0)
    b_high, b_low = split_2(tl.load(p_q, mask=m_row, other=0.0))
    b_zero = tl.zeros((NC, SIDE, SIDE), dtype=tl.float32)
    b_s = dot(b_v, tl.permute(b_low, (0, 2, 1)), b_zero)
    b_dot += tl.sum(dot(b_v, tl.permute(b_high, (0, 2, 1)), b_s), axis=0)
    return b_dot, b_slope + tl.sum(dot(b_v, tl.permute(b_g, (0, 2, 1)), b_zero), axis=0)


@triton.jit
def _pull_sums(b_u, b_p, b_c, p_g, p_q, m_row, NC: tl.constexpr):
    """``u + P G + C Q`` over the channels of a tile.

    G and Q come from the L1 cache once more: while P is computed they would take too many
    registers. The hints keep the compiler from joining the loads.
    """
    b_high, b_low = split_2(b_p)
    b_g = tl.load(p_g, mask=m_row, other=0.0, eviction_policy="evict_first")
    b_u = dot_2(_wide(b_high, NC), _wide(b_low, NC), b_g, b_u)
    b_high, b_low = split_2(b_c)
    b_q = tl.load(p_q, mask=m_row, other=0.0, eviction_policy="evict_last")
    b_qh, b_ql = split_2(b_q)
    b_u = dot(_wide(b_high, NC), b_ql, b_u)
    return dot_2(_wide(b_high, NC), _wide(b_low, NC), b_qh, b_u)


@triton.jit
def _store_pull(p_to, p_v, b_u, b_c, m_state, ACCUMULATE: tl.constexpr):
    """Stores ``u - c v``, where ACCUMULATE plus what is there."""
    b_u -= tl.load(p_v, mask=m_state, other=0.0).to(tl.float32) * b_c[None, :, :]
    if ACCUMULATE:
        b_u += tl.load(p_to, mask=m_state, other=0.0).to(tl.float32)
    tl.store(p_to, rounded(b_u, p_to.dtype.element_ty), mask=m_state)


@triton.jit(do_not_specialize=PULL_SIZES)
def attend_pull_dot_kernel(
    p_grads, p_states, p_query, p_bias, p_rstd, p_stats, p_out, p_ds,
    T, R, first_slot, step_slot, first_row, step_row, rows, first_k, step_k, K, first_out, step_out,
    s_grads, s_grad, s_n, s_state, s_out, s_row,
    RELU: tl.constexpr, ACCUMULATE: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = NC * BC
    o_d, o_j, o_l = _channels(NC, BC), tl.arange(0, SIDE), tl.arange(0, SIDE)
    m_j, k = o_j < K, slot(first_k, o_j, step_k)
    p_state = p_states + k[None, :, None] * s_n + o_d
    p_u = p_out + slot(first_out, o_j, step_out)[None, :, None] * s_out + o_d
    m_state, m_half = m_j[None, :, None] & (o_d < D), m_j[None, :, None] & (HALF + o_d < D)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for i in range(0, tl.cdiv(T - tl.program_id(0), programs)):
        t = first + i * programs
        p_v, p_to = p_state + t * s_state, p_u + t * s_row
        b_r = tl.load(p_rstd + k * T + t, mask=m_j, other=0.0)[:, None]
        b_u = tl.zeros((NC, SIDE, BC), dtype=tl.float32)
        b_w = tl.zeros((NC, SIDE, BC), dtype=tl.float32)
        b_back = tl.zeros((SIDE,), dtype=tl.float32)
        for start in tl.range(0, rows, SIDE, num_stages=1):
            m_l, row = start + o_l < rows, slot(first_row, start + o_l, step_row)
            m_pair, m_row = m_j[:, None] & m_l[None, :], m_l[None, :, None] & (o_d < D)
            o_g = slot(first_slot, start + o_l, step_slot)[None, :, None] * s_grads
            p_g, p_q = p_grads + o_g + t * s_grad + o_d, p_query + row[None, :, None] * D + o_d
            if not RELU:
                p_row = p_stats + row * 3 * T + t
                b_most = tl.load(p_row, mask=m_l, other=0.0)[None, :]
                b_total = tl.load(p_row + T, mask=m_l, other=1.0)[None, :]
                b_delta = tl.load(p_row + 2 * T, mask=m_l, other=0.0)[None, :]
            b_dot = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            b_dot, b_slope = _pull_scores(b_dot, b_dot, p_v, p_g, p_q, m_state, m_row, NC)
            if D > HALF:
                b_dot, b_slope = _pull_scores(
                    b_dot, b_slope, p_v + HALF, p_g + HALF, p_q + HALF, m_half,
                    m_l[None, :, None] & (HALF + o_d < D), NC,
                )  # fmt: skip
            b_dot *= b_r
            b_s = b_dot
            if p_bias is not None:
                o_bias = row.to(tl.int32)[None, :] * R + k.to(tl.int32)[:, None]
                b_s += tl.load(p_bias + o_bias, mask=m_pair, other=0.0)
            if RELU:
                b_p = tl.where(m_pair, relu(b_s), 0.0)
                b_ds = tl.where(m_pair, tl.where(b_s > 0, b_slope, 0.0), 0.0)
            else:
                b_p = tl.where(m_pair, tl.exp(b_s - b_most) / b_total, 0.0)
                b_ds = tl.where(m_pair, b_p * (b_slope - b_delta), 0.0)
            b_back += tl.sum(b_ds * b_dot, axis=1)
            if p_ds is not None:
                o_ds = (t * rows + start + o_l)[None, :] * K + o_j[:, None]
                tl.store(p_ds + o_ds, b_ds, mask=m_pair)
            b_u = _pull_sums(b_u, b_p, b_ds * b_r, p_g, p_q, m_row, NC)
            if D > HALF:
                b_w = _pull_sums(
                    b_w, b_p, b_ds * b_r, p_g + HALF, p_q + HALF,
                    m_l[None, :, None] & (HALF + o_d < D), NC,
                )  # fmt: skip
        b_c = b_r * b_r * b_back[:, None] / D
        _store_pull(p_to, p_v, b_u, b_c, m_state, ACCUMULATE)
        if D > HALF:
            _store_pull(p_to + HALF, p_v + HALF, b_w, b_c, m_half, ACCUMULATE)
