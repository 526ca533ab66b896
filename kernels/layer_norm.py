"""Layer normalisation (Ba, Kiros, Hinton 2016) after dropout and a residual add.

    sum = residual + dropout(x),  n = (sum - mean) * rstd,  y = n * weight + bias

    dn = dy * weight,  ds = rstd * (dn - mean(dn) - n * mean(dn * n)) + dsum

With RMS (Zhang, Sennrich 2019) both means are left out, and rstd = 1 / sqrt(mean(sum^2) + eps).

Both kernels hold whole rows. Backward runs a fixed number of programs. Each keeps its part of
``dweight`` and ``dbias`` in registers and loads the next tile while it computes.
"""

import triton
import triton.language as tl

from .common import (
    dropout,
    even_programs,
    flat_rows,
    load_rows,
    multiprocessors,
    norm_backward,
    normalise,
    residency,
    rounded,
    row_channels,
    row_tile,
    store_rows,
    store_stat,
    store_sum,
    store_tile,
)
from .launch import cdiv, launch, launcher
from .sums import sum_partials


@triton.jit(do_not_specialize=["T", "threshold"])
def layer_norm_fwd_kernel(
    p_x, p_residual, p_weight, p_bias, p_seed, p_sum, p_y, p_mean, p_rstd,
    T, eps, threshold, scale,
    s_x, s_residual, s_sum, s_y,
    RMS: tl.constexpr, D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BT
    o_row, o_d, m = flat_rows(first, T, D, BA, BT, BC)
    m_d = row_channels(BA, BC) < D
    o_t = first + tl.arange(0, BT).to(tl.int64)
    m_t = o_t < T
    b_s = load_rows(p_x + o_row * s_x + o_d, m, BA, BT, BC).to(tl.float32)
    b_s = dropout(b_s, p_seed, o_t, threshold, scale, BA, BT, BC)
    if p_residual is not None:
        b_s += load_rows(p_residual + o_row * s_residual + o_d, m, BA, BT, BC).to(tl.float32)
    if p_sum is not None:
        # Normalise the rounded sum, which is what backward will read.
        b_rounded = rounded(b_s, p_sum.dtype.element_ty)
        store_rows(p_sum + o_row * s_sum + o_d, b_rounded, m, BA, BT, BC)
        b_s = b_rounded.to(tl.float32)
    b_y, b_mean, b_rstd = normalise(b_s, m_d, D, eps, RMS)
    if p_weight is not None:
        b_y *= load_rows(p_weight + o_d, o_d < D, BA, BT, BC)
    if p_bias is not None:
        b_y += load_rows(p_bias + o_d, o_d < D, BA, BT, BC)
    store_rows(p_y + o_row * s_y + o_d, b_y, m, BA, BT, BC)
    if not RMS:
        store_stat(p_mean, b_mean, o_t, m_t)
    store_stat(p_rstd, b_rstd, o_t, m_t)


@triton.jit
def _load_backward(
    p_sum, p_dy, p_dsum, p_mean, p_rstd, first, T, s_sum, s_dy, s_dsum,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The operands of a tile of tokens, in their storage dtypes.

    dy stands for a missing dsum, and rstd for a missing mean.
    """
    o_row, o_d, m = flat_rows(first, T, D, BA, BT, BC)
    b_s = load_rows(p_sum + o_row * s_sum + o_d, m, BA, BT, BC)
    b_dy = load_rows(p_dy + o_row * s_dy + o_d, m, BA, BT, BC)
    b_dsum = b_dy
    if p_dsum is not None:
        b_dsum = load_rows(p_dsum + o_row * s_dsum + o_d, m, BA, BT, BC)
    o_t = first + tl.arange(0, BT)
    m_t = o_t < T
    b_rstd = tl.load(p_rstd + o_t, mask=m_t, other=0.0)
    b_mean = b_rstd
    if p_mean is not None:
        b_mean = tl.load(p_mean + o_t, mask=m_t, other=0.0)
    return b_s, b_dy, b_dsum, b_mean, b_rstd


@triton.jit(do_not_specialize=["T", "threshold"])
def layer_norm_bwd_kernel(
    p_sum, p_dy, p_dsum, p_weight, p_mean, p_rstd, p_seed, p_dx, p_dresidual, p_partial,
    T, threshold, scale,
    s_sum, s_dy, s_dsum, s_dx, s_dresidual,
    RMS: tl.constexpr, D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_d = row_channels(BA, BC)
    m_d = o_d < D
    if p_weight is not None:
        b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0)
    b_dw = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_db = tl.zeros((BA, BT, BC), dtype=tl.float32)
    step = tl.num_programs(0) * BT
    begin = tl.program_id(0) * BT
    b_s, b_dy, b_dsum, b_mean, b_rstd = _load_backward(
        p_sum, p_dy, p_dsum, p_mean, p_rstd, begin, T, s_sum, s_dy, s_dsum, D, BA, BT, BC
    )
    for first in range(begin, T, step):
        next_s, next_dy, next_dsum, next_mean, next_rstd = _load_backward(
            p_sum, p_dy, p_dsum, p_mean, p_rstd, first + step, T, s_sum, s_dy, s_dsum, D, BA, BT, BC
        )
        o_row, o_flat, m = flat_rows(first, T, D, BA, BT, BC)
        b_r = b_rstd[None, :, None]
        b_n = b_s.to(tl.float32)
        if not RMS:
            b_n -= b_mean[None, :, None]
        b_n = tl.where(m_d, b_n * b_r, 0.0)
        b_ds = b_dy.to(tl.float32)
        if p_partial is not None:
            b_dw += b_ds * b_n
            b_db += b_ds
        if p_weight is not None:
            b_ds *= b_w
        b_ds = norm_backward(b_ds, b_n, b_r, D, RMS)
        if p_dsum is not None:
            b_ds += b_dsum.to(tl.float32)
        store_tile(p_dresidual, s_dresidual, o_row, o_flat, m, b_ds)
        o_t = first + tl.arange(0, BT).to(tl.int64)
        b_ds = dropout(b_ds, p_seed, o_t, threshold, scale, BA, BT, BC)
        store_tile(p_dx, s_dx, o_row, o_flat, m, b_ds)
        b_s, b_dy, b_dsum, b_mean, b_rstd = next_s, next_dy, next_dsum, next_mean, next_rstd
    if p_partial is not None:
        p = p_partial + tl.program_id(0).to(tl.int64) * 2 * D + o_d
        store_sum(p, b_dw, m_d)
        store_sum(p + D, b_db, m_d)


@launcher
def layer_norm_forward(a):
    T, D = a.x.shape
    # Up to D = 1024 one warp holds a whole row, so no sum crosses warps.
    tile = row_tile(D, a.x.element_size(), per_thread=32, num_warps=4)
    # Drawing the dropout mask needs registers: for sm_100 ptxas would use only 80, and spill.
    registers = 128 if a.dropout_p > 0 else None
    programs = (cdiv(T, tile.BT),)
    launch(layer_norm_fwd_kernel, programs, a, T=T, D=D, maxnreg=registers, **tile._asdict())


@launcher
def layer_norm_backward(a):
    T, D = a.sum.shape
    itemsize, fused = a.sum.element_size(), a.dsum is not None or a.dropout_p > 0
    # 32 bytes of each operand per thread. With the weight, the sums and the next tile they fill its
    # registers. Speed depends on the bytes in flight, not on the warps, so there are few.
    tile = row_tile(D, itemsize, per_thread=32 // itemsize, num_warps=4)
    programs, registers = residency(12 if fused else 16, tile.num_warps)
    programs = even_programs(cdiv(T, tile.BT), programs * multiprocessors(a.sum.device))
    partial = None
    if a.dweight is not None or a.dbias is not None:
        partial = a.rstd.new_empty(programs, 2, 1, D)
    launch(
        layer_norm_bwd_kernel, (programs,), a, p_partial=partial, T=T, D=D, maxnreg=registers,
        **tile._asdict(),
    )  # fmt: skip
    if partial is not None:
        sum_partials(partial, a.dweight, a.dbias)
