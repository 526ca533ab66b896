"""The far passes of the depth connection: products of depth weights with many states at once.

    mix_rows     out_b = sum_k W[row_b, k] z_k,  z_k = state_k * norm_weight_k + norm_bias_k
    pull_rows    out_j = sum_l W[l, j] g_l,  dW[l, j] = <g_l, z_j>

Each is the product of a small and a very long matrix, limited by memory traffic: a launch reads
each state once and keeps the sums of up to 16 rows in registers. A launch takes its lists of slots
as arithmetic progressions (first, step); another list takes several launches. For bf16 states and
scalar weights the products run on tensor cores, where three bf16 numbers hold the 24 bits of a
weight. Other products use FMA.
"""

import torch
import triton
import triton.language as tl

from .common import dot, dot_weight, multiprocessors, progressions, rounded
from .launch import call, cdiv, launcher, next_power_of_2
from .sums import sum_partials

ROWS = 16
"""Sums that a launch keeps."""

# Numbers that change from launch to launch; no compiled variant depends on them.
MIX_SIZES = [
    *("T", "R", "K", "first_k", "step_k", "rows", "first_row", "step_row", "first_out"),
    "step_out",
]
PULL_SIZES = [*MIX_SIZES, "first_slot", "step_slot"]


@triton.jit
def _load_state(p_state, p_norm_weight, p_norm_bias, o_x, o_d, m_x, m_d):
    """z = state * norm_weight + norm_bias, a (BT, BD) tile in fp32."""
    b_z = tl.load(p_state + o_x, mask=m_x, other=0.0).to(tl.float32)
    if p_norm_weight is not None:
        b_z *= tl.load(p_norm_weight + o_d, mask=m_d, other=0.0)
    if p_norm_bias is not None:
        b_z += tl.load(p_norm_bias + o_d, mask=m_d, other=0.0)
    return b_z


@triton.jit(do_not_specialize=MIX_SIZES)
def mix_rows_kernel(
    p_states, p_weight, p_norm_weight, p_norm_bias, p_out,
    T, D, R, first_k, step_k, K, first_row, step_row, rows, first_out, step_out,
    s_state, s_out,
    PER_CHANNEL: tl.constexpr, ACCUMULATE: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    o_t = (tl.program_id(0) // tiles).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = (tl.program_id(0) % tiles).to(tl.int64) * BD + tl.arange(0, BD)[None, :]
    o_r = tl.arange(0, BR)
    m_r, m_d = o_r < rows, o_d < D
    m_x = (o_t < T)[:, None] & m_d
    m_out = m_r[:, None, None] & m_x[None, :, :]
    o_x = o_t[:, None] * D + o_d
    o_out = (first_out + o_r * step_out).to(tl.int64)[:, None, None] * s_out + o_x[None, :, :]
    o_w = (first_row + o_r * step_row).to(tl.int64) * R
    b_sum = tl.zeros((BR, BT, BD), dtype=tl.float32)
    if ACCUMULATE:
        b_sum += tl.load(p_out + o_out, mask=m_out, other=0.0).to(tl.float32)
    for i in tl.range(0, K, num_stages=STAGES):
        k = (first_k + i * step_k).to(tl.int64)
        o_kd = k * D + o_d
        b_z = _load_state(p_states + k * s_state, p_norm_weight, p_norm_bias, o_x, o_kd, m_x, m_d)
        if PER_CHANNEL:
            o_wd = (o_w + k)[:, None] * D + o_d
            b_w = tl.load(p_weight + o_wd, mask=m_r[:, None] & m_d, other=0.0)[:, None, :]
        else:
            b_w = tl.load(p_weight + o_w + k, mask=m_r, other=0.0)[:, None, None]
        b_sum += b_w * b_z[None, :, :]
    tl.store(p_out + o_out, rounded(b_sum, p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=MIX_SIZES)
def mix_rows_dot_kernel(
    p_states, p_weight, p_norm_weight, p_norm_bias, p_out,
    T, D, R, first_k, step_k, K, first_row, step_row, rows, first_out, step_out,
    s_state, s_out,
    ACCUMULATE: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BK: tl.constexpr = 16
    tiles = tl.cdiv(D, BD)
    o_t = (tl.program_id(0) // tiles).to(tl.int64) * BT + tl.arange(0, BT)[None, :, None]
    o_d = (tl.program_id(0) % tiles).to(tl.int64) * BD + tl.arange(0, BD)[None, None, :]
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    m_r, m_d = o_r < rows, o_d < D
    m_x = (o_t < T) & m_d
    m_out = m_r[:, None, None] & m_x
    o_x = o_t * D + o_d
    o_out = (first_out + o_r * step_out).to(tl.int64)[:, None, None] * s_out + o_x
    o_w = (first_row + o_r * step_row).to(tl.int64)[None, :] * R
    if ACCUMULATE:
        b_sum = tl.load(p_out + o_out, mask=m_out, other=0.0).to(tl.float32)
        b_sum = tl.permute(tl.reshape(b_sum, (BR, BT * BD)), (1, 0))
    else:
        b_sum = tl.zeros((BT * BD, BR), dtype=tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        m_k = start + o_k < K
        k = (first_k + (start + o_k) * step_k).to(tl.int64)
        b_w = tl.load(p_weight + o_w + k[:, None], mask=m_k[:, None] & m_r[None, :], other=0.0)
        k, m_k = k[:, None, None], m_k[:, None, None]
        o_kx, m_kx, m_kd = k * s_state + o_x, m_k & m_x, m_k & m_d
        b_z = _load_state(p_states, p_norm_weight, p_norm_bias, o_kx, k * D + o_d, m_kx, m_kd)
        b_x = tl.permute(tl.reshape(rounded(b_z, tl.bfloat16), (BK, BT * BD)), (1, 0))
        b_sum = dot_weight(b_x, b_w, b_sum)
    b_sum = tl.reshape(tl.permute(b_sum, (1, 0)), (BR, BT, BD))
    tl.store(p_out + o_out, rounded(b_sum, p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=PULL_SIZES)
def pull_rows_kernel(
    p_grads, p_states, p_weight, p_norm_weight, p_norm_bias, p_out, p_partial,
    T, D, R, first_slot, step_slot, first_row, step_row, rows, first_k, step_k, K, first_out,
    step_out,
    s_grad, s_state, s_out,
    PER_CHANNEL: tl.constexpr, ACCUMULATE: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BD)
    tile_t = (tl.program_id(0) // tiles).to(tl.int64)
    o_t = tile_t * BT + tl.arange(0, BT)
    o_d = (tl.program_id(0) % tiles).to(tl.int64) * BD + tl.arange(0, BD)[None, :]
    o_j = tl.arange(0, BK)
    m_j, m_d = o_j < K, o_d < D
    m_x = (o_t < T)[:, None] & m_d
    m = m_j[:, None, None] & m_x[None, :, :]
    o_x = o_t[:, None] * D + o_d
    o_k = (first_k + o_j * step_k).to(tl.int64)
    o_out = (first_out + o_j * step_out).to(tl.int64)[:, None, None] * s_out + o_x[None, :, :]
    b_sum = tl.zeros((BK, BT, BD), dtype=tl.float32)
    if ACCUMULATE:
        b_sum += tl.load(p_out + o_out, mask=m, other=0.0).to(tl.float32)
    if p_partial is not None:
        o_kx = o_k[:, None, None] * s_state + o_x[None, :, :]
        o_kd = o_k[:, None, None] * D + o_d[None, :, :]
        m_kd = m_j[:, None, None] & m_d[None, :, :]
        b_z = _load_state(p_states, p_norm_weight, p_norm_bias, o_kx, o_kd, m, m_kd)
    for i in tl.range(0, rows, num_stages=STAGES):
        slot = (first_slot + i * step_slot).to(tl.int64)
        row = (first_row + i * step_row).to(tl.int64)
        b_g = tl.load(p_grads + slot * s_grad + o_x, mask=m_x, other=0.0).to(tl.float32)[None, :, :]
        if PER_CHANNEL:
            p_w = p_weight + (row * R + o_k)[:, None] * D + o_d
            b_w = tl.load(p_w, mask=m_j[:, None] & m_d, other=0.0)
            b_sum += b_w[:, None, :] * b_g
        else:
            b_w = tl.load(p_weight + row * R + o_k, mask=m_j, other=0.0)
            b_sum += b_w[:, None, None] * b_g
        if p_partial is not None:
            b_dw = tl.sum(b_z * b_g, axis=1)
            if PER_CHANNEL:
                o_dw = ((tile_t * rows + i) * K + o_j)[:, None] * D + o_d
                tl.store(p_partial + o_dw, b_dw, mask=m_j[:, None] & m_d)
            else:
                o_dw = (tl.program_id(0).to(tl.int64) * rows + i) * K + o_j
                tl.store(p_partial + o_dw, tl.sum(b_dw, axis=1), mask=m_j)
    tl.store(p_out + o_out, rounded(b_sum, p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=PULL_SIZES)
def pull_rows_dot_kernel(
    p_grads, p_states, p_weight, p_norm_weight, p_norm_bias, p_out, p_partial,
    N, D, R, first_slot, step_slot, first_row, step_row, rows, first_k, step_k, K, first_out,
    step_out,
    s_grad, s_state, s_out,
    ACCUMULATE: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # Here a state is a row of N = T * D elements. The first of three axes is the warp: each warp
    # has its own BN elements, so no two warps compute the same product.
    BL: tl.constexpr = 16
    o_tile = tl.arange(0, BW)[:, None, None] * BN + tl.arange(0, BN)[None, None, :]
    o_j = tl.arange(0, BK)
    m_j = o_j < K
    o_k = (first_k + o_j * step_k).to(tl.int64)
    o_out = (first_out + o_j * step_out).to(tl.int64)[None, :, None] * s_out
    if p_partial is not None:
        p_partial += tl.program_id(0).to(tl.int64) * rows * K
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BW * BN), tl.num_programs(0)):
        first_n = tile * tl.full((1, 1, 1), BW * BN, dtype=tl.int64)
        o_n = first_n + o_tile
        m_n = o_n < N
        m_kn = m_j[None, :, None] & m_n
        b_sum = tl.zeros((BW, BN, BK), dtype=tl.float32)
        if ACCUMULATE:
            b_out = tl.load(p_out + o_out + o_n, mask=m_kn, other=0.0).to(tl.float32)
            b_sum += tl.permute(b_out, (0, 2, 1))
        if p_partial is not None:
            o_d = o_n % D
            o_kn = o_k[None, :, None] * s_state + o_n
            o_kd = o_k[None, :, None] * D + o_d
            b_z = _load_state(p_states, p_norm_weight, p_norm_bias, o_kn, o_kd, m_kn, m_kn)
            b_z = tl.permute(rounded(b_z, tl.bfloat16), (0, 2, 1))
        for start in range(0, rows, BL):
            o_i = start + tl.arange(0, BL)
            m_i = o_i < rows
            o_g = (first_slot + o_i * step_slot).to(tl.int64)[None, :, None] * s_grad + o_n
            o_w = (first_row + o_i * step_row).to(tl.int64)[:, None] * R + o_k[None, :]
            m_w = m_i[:, None] & m_j[None, :]
            b_g = tl.load(p_grads + o_g, mask=m_i[None, :, None] & m_n, other=0.0)  # (BW, BL, BN)
            b_w = tl.load(p_weight + o_w, mask=m_w, other=0.0)
            b_w = tl.broadcast_to(b_w[None, :, :], (BW, BL, BK))
            if p_partial is not None:
                # The sums of this program so far, initially 0. No other program uses them.
                p_dw = p_partial + o_i[:, None] * K + o_j[None, :]
                b_dw = tl.load(p_dw, mask=m_w, other=0.0)
            b_sum = dot_weight(tl.permute(b_g, (0, 2, 1)), b_w, b_sum)
            if p_partial is not None:
                b_zeros = tl.zeros((BW, BL, BK), dtype=tl.float32)
                tl.store(p_dw, b_dw + tl.sum(dot(b_g, b_z, b_zeros), axis=0), mask=m_w)
                # Another thread may load these sums for the next tile.
                tl.debug_barrier()
        b_out = rounded(tl.permute(b_sum, (0, 2, 1)), p_out.dtype.element_ty)
        tl.store(p_out + o_out + o_n, b_out, mask=m_kn)


def _stream_shape(states, weight, norm_weight, norm_bias):
    """(T, D) of a slot, or (1, T * D) where nothing depends on the channel."""
    _, T, D = states.shape
    flat = weight.dim() == 2 and norm_weight is None and norm_bias is None
    return (1, T * D) if flat else (T, D)


def _stream_tile(T, D, BD, elements):
    """(BT, BD) of a tile with ``elements`` elements and at most ``BD`` channels, unless T is 1."""
    BD = min(elements if T == 1 else BD, max(16, next_power_of_2(D)))
    return elements // BD, BD


@launcher
def mix_rows(a):
    T, D = _stream_shape(a.states, a.weight, a.norm_weight, a.norm_bias)
    for count, row, place in progressions(a.rows, a.out_rows, limit=ROWS):
        if a.states.dtype == torch.bfloat16 and a.weight.dim() == 2:
            kernel, BR = mix_rows_dot_kernel, max(8, next_power_of_2(count))
            BT, BD = _stream_tile(T, D, 64, 512)
            sides = {"BT": BT, "BD": BD, "STAGES": 2, "num_warps": 4}
        else:
            kernel, BR = mix_rows_kernel, next_power_of_2(count)
            BT, BD = _stream_tile(T, D, 128, 2048 if count <= 8 else 1024)
            vector = a.weight.dim() == 3
            sides = {"PER_CHANNEL": vector, "BT": BT, "BD": BD, "STAGES": 4, "num_warps": 4}
        grid = (cdiv(T, BT) * cdiv(D, BD),)
        for i, (K, k) in enumerate(progressions(a.sources, limit=len(a.sources))):
            call(
                kernel, grid,
                a.states, a.weight, a.norm_weight, a.norm_bias, a.out,
                T, D, a.weight.shape[0], *k, K, *row, count, *place,
                a.states.stride(0), a.out.stride(0),
                ACCUMULATE=a.accumulate or i > 0, BR=BR, **sides,
            )  # fmt: skip


@launcher
def pull_rows(a):
    T, D = _stream_shape(a.states, a.weight, a.norm_weight, a.norm_bias)
    per_channel = a.weight.dim() == 3
    use_dot = a.states.dtype == torch.bfloat16 and not per_channel
    for K, k, place in progressions(a.sources, a.out_rows, limit=ROWS if use_dot else ROWS // 2):
        BK = max(8, next_power_of_2(K))
        if use_dot:
            kernel, shape = pull_rows_dot_kernel, (a.states[0].numel(), a.states.shape[2])
            sides = {"BW": 4, "BN": 1024 // BK, "num_warps": 4, "num_stages": 1}
            programs = cdiv(shape[0], sides["BW"] * sides["BN"])
            programs = min(programs, 3 * multiprocessors(a.states.device))
        else:
            kernel, shape = pull_rows_kernel, (T, D)
            # A weight per channel needs a partial sum per channel, so tiles have more tokens.
            BT, BD = _stream_tile(T, D, 32 if per_channel else 128, 2048)
            sides = {"PER_CHANNEL": per_channel, "BT": BT, "BD": BD, "STAGES": 3, "num_warps": 8}
            programs = cdiv(T, BT) * cdiv(D, BD)
        for i, (L, row, slot) in enumerate(progressions(a.rows, a.grad_slots, limit=len(a.rows))):
            partial = None
            if a.dweight is not None:
                size = (cdiv(T, BT), 1, L, K * D) if per_channel else (programs, 1, L, K)
                partial = a.weight.new_zeros(size) if use_dot else a.weight.new_empty(size)
            call(
                kernel, (programs,),
                a.grads, a.states, a.weight, a.norm_weight, a.norm_bias, a.out, partial,
                *shape, a.weight.shape[0], *slot, *row, L, *k, K, *place,
                a.grads.stride(0), a.states.stride(0), a.out.stride(0),
                ACCUMULATE=a.accumulate or i > 0, BK=BK, **sides,
            )  # fmt: skip
            if partial is not None:
                sum_into(partial, a.dweight, L, row, K, k)


def sum_into(partial, dweight, L, row, K, k):
    """Sums the parts of all programs into the entries of dweight that two progressions give."""
    (first_row, step_row), (first_k, step_k) = row, k
    rows = slice(first_row, first_row + L * step_row, step_row)
    block = dweight[rows, first_k : first_k + K * step_k : step_k]
    if step_k == 1:
        sum_partials(partial, block.flatten(1))
    else:
        sums = partial.new_empty(partial.shape[2:])
        sum_partials(partial, sums)
        block.copy_(sums.view(block.shape))
