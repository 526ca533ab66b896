"""Layer normalisation (Ba, Kiros, Hinton 2016) with dropout and a residual in front of it.

    sum = residual + dropout(x),  n = (sum - mean) * rstd,  y = n * weight + bias

    dn = dy * weight,  ds = rstd * (dn - mean(dn) - n * mean(dn * n)) + dsum

Both kernels hold whole rows. Backward runs a fixed number of programs that keep their share of
``dweight`` and ``dbias`` in registers and read a tile ahead.
"""

import triton
import triton.language as tl

from .common import (
    Residency,
    RowTile,
    dropout,
    dropout_factors,
    even_programs,
    multiprocessors,
    norm_backward,
    normalise,
    residency,
    rounded,
    row_channels,
    row_tile,
    stride,
    sum_partials,
)


def forward_tile(D: int, itemsize: int) -> RowTile:
    """A warp holds rows up to D = 1024 alone: no sum crosses warps."""
    return row_tile(D, itemsize, per_thread=32, num_warps=4)


def backward_tile(D: int, itemsize: int) -> RowTile:
    """32 bytes of each operand per thread: with weight, sums and the tile read ahead they fill
    its registers."""
    return row_tile(D, itemsize, per_thread=32 // itemsize, num_warps=4)


def backward_residency(tile: RowTile, fused: bool) -> Residency:
    """Few warps with many registers: what counts is the bytes in flight, not the warps."""
    return residency(12 if fused else 16, tile.num_warps)


@triton.jit(do_not_specialize=["T", "threshold"])
def layer_norm_fwd_kernel(
    p_x, p_residual, p_weight, p_bias, p_seed, p_sum, p_y, p_mean, p_rstd,
    T, D, eps, threshold, scale,
    s_x, s_residual, s_sum, s_y,
    BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = row_channels(BA, BC)
    m_t, m_d = o_t < T, o_d < D
    o_row = o_t[None, :, None]
    m = m_t[None, :, None] & m_d
    b_s = tl.load(p_x + o_row * s_x + o_d, mask=m, other=0.0).to(tl.float32)
    if p_seed is not None:
        b_s = dropout(b_s, p_seed, o_t, threshold, scale, BA, BT, BC)
    if p_residual is not None:
        b_s += tl.load(p_residual + o_row * s_residual + o_d, mask=m, other=0.0).to(tl.float32)
    if p_sum is not None:
        # What is normalised is the sum as backward will read it.
        b_rounded = rounded(b_s, p_sum.dtype.element_ty)
        tl.store(p_sum + o_row * s_sum + o_d, b_rounded, mask=m)
        b_s = b_rounded.to(tl.float32)
    b_y, b_mean, b_rstd = normalise(b_s, m_d, D, eps)
    if p_weight is not None:
        b_y *= tl.load(p_weight + o_d, mask=m_d, other=0.0)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_d, mask=m_d, other=0.0)
    tl.store(p_y + o_row * s_y + o_d, rounded(b_y, p_y.dtype.element_ty), mask=m)
    tl.store(p_mean + o_t, tl.reshape(b_mean, (BT,)), mask=m_t)
    tl.store(p_rstd + o_t, tl.reshape(b_rstd, (BT,)), mask=m_t)


@triton.jit
def _load_backward(
    p_sum, p_dy, p_dsum, p_mean, p_rstd, o_t, o_d, T, D, s_sum, s_dy, s_dsum
):  # fmt: skip
    """What backward reads of a tile of tokens, as it is stored; ``dy`` again for no ``dsum``."""
    m_t = o_t < T
    o_row = o_t[None, :, None]
    m = m_t[None, :, None] & (o_d < D)
    b_s = tl.load(p_sum + o_row * s_sum + o_d, mask=m, other=0.0)
    b_dy = tl.load(p_dy + o_row * s_dy + o_d, mask=m, other=0.0)
    b_dsum = b_dy
    if p_dsum is not None:
        b_dsum = tl.load(p_dsum + o_row * s_dsum + o_d, mask=m, other=0.0)
    b_mean = tl.load(p_mean + o_t, mask=m_t, other=0.0)
    b_rstd = tl.load(p_rstd + o_t, mask=m_t, other=0.0)
    return b_s, b_dy, b_dsum, b_mean, b_rstd


@triton.jit(do_not_specialize=["T", "threshold"])
def layer_norm_bwd_kernel(
    p_sum, p_dy, p_dsum, p_weight, p_mean, p_rstd, p_seed, p_dx, p_dresidual, p_partial,
    T, D, threshold, scale,
    s_sum, s_dy, s_dsum, s_dx, s_dresidual,
    BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_d = row_channels(BA, BC)
    m_d = o_d < D
    if p_weight is not None:
        b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0)
    b_dw = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_db = tl.zeros((BA, BT, BC), dtype=tl.float32)
    step = tl.num_programs(0) * BT
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b_s, b_dy, b_dsum, b_mean, b_rstd = _load_backward(
        p_sum, p_dy, p_dsum, p_mean, p_rstd, o_t, o_d, T, D, s_sum, s_dy, s_dsum
    )
    for _ in range(tl.program_id(0) * BT, T, step):
        next_s, next_dy, next_dsum, next_mean, next_rstd = _load_backward(
            p_sum, p_dy, p_dsum, p_mean, p_rstd, o_t + step, o_d, T, D, s_sum, s_dy, s_dsum
        )
        o_row = o_t[None, :, None]
        m = (o_t < T)[None, :, None] & m_d
        b_r = b_rstd[None, :, None]
        b_n = (b_s.to(tl.float32) - b_mean[None, :, None]) * b_r
        b_n = tl.where(m_d, b_n, 0.0)
        b_ds = b_dy.to(tl.float32)
        if p_partial is not None:
            b_dw += b_ds * b_n
            b_db += b_ds
        if p_weight is not None:
            b_ds *= b_w
        b_ds = norm_backward(b_ds, b_n, b_r, D)
        if p_dsum is not None:
            b_ds += b_dsum.to(tl.float32)
        if p_dresidual is not None:
            p = p_dresidual + o_row * s_dresidual + o_d
            tl.store(p, rounded(b_ds, p_dresidual.dtype.element_ty), mask=m)
        if p_dx is not None:
            if p_seed is not None:
                b_ds = dropout(b_ds, p_seed, o_t, threshold, scale, BA, BT, BC)
            tl.store(p_dx + o_row * s_dx + o_d, rounded(b_ds, p_dx.dtype.element_ty), mask=m)
        b_s, b_dy, b_dsum, b_mean, b_rstd = next_s, next_dy, next_dsum, next_mean, next_rstd
        o_t += step
    if p_partial is not None:
        p = p_partial + tl.program_id(0).to(tl.int64) * 2 * D + o_d
        tl.store(p, tl.sum(b_dw, axis=1)[:, None, :], mask=m_d)
        tl.store(p + D, tl.sum(b_db, axis=1)[:, None, :], mask=m_d)


def layer_norm_forward(x, residual, weight, bias, eps, dropout_p, seed, sum, y, mean, rstd):
    """See `deepfast.reference.launchers.layer_norm_forward`."""
    T, D = x.shape
    if T == 0:
        return
    tile = forward_tile(D, x.element_size())
    threshold, scale = dropout_factors(dropout_p)
    layer_norm_fwd_kernel[(triton.cdiv(T, tile.BT),)](
        x, residual, weight, bias, seed if dropout_p > 0 else None, sum, y, mean, rstd,
        T, D, eps, threshold, scale,
        stride(x), stride(residual), stride(sum), stride(y),
        # Dropout's draws need them: left to itself ptxas stops at 80 for sm_100, and spills.
        **tile._asdict(), maxnreg=128 if dropout_p > 0 else None,
    )  # fmt: skip


def layer_norm_backward(
    sum, dy, dsum, weight, mean, rstd, dropout_p, seed, dx, dresidual, dweight, dbias
):
    """See `deepfast.reference.launchers.layer_norm_backward`."""
    T, D = sum.shape
    tile = backward_tile(D, sum.element_size())
    programs, registers = backward_residency(tile, dsum is not None or dropout_p > 0)
    programs = even_programs(triton.cdiv(T, tile.BT), programs * multiprocessors(sum.device))
    partial = None
    if dweight is not None or dbias is not None:
        partial = mean.new_empty(programs, 2, 1, D)
    threshold, scale = dropout_factors(dropout_p)
    if T > 0:
        layer_norm_bwd_kernel[(programs,)](
            sum, dy, dsum, weight, mean, rstd, seed if dropout_p > 0 else None, dx, dresidual,
            partial,
            T, D, threshold, scale,
            stride(sum), stride(dy), stride(dsum), stride(dx), stride(dresidual),
            **tile._asdict(), maxnreg=registers,
        )  # fmt: skip
    if partial is not None:
        sum_partials(partial, *(None if d is None else d.view(1, D) for d in (dweight, dbias)))
