"""An LSTM layer with peepholes: one launch per step, which includes the product with the weight.

    (z, rho, phi, pi) = f_t + h_{t-1} W
    c_t = tanh(z) * s(rho + p_0 c_{t-1}) + s(phi + p_1 c_{t-1}) * c_{t-1}
    h_t = tanh(c_t) * s(pi + p_2 c_t)

Zhou et al. 2016, Eq. 4; s is the logistic function; B sentences, H channels. A program has BB
sentences and BH channels. It computes all four gates of its channels, so that the cell runs in
registers. A launch stores h (forward) or df (backward), which the next launch multiplies.
"""

import torch
import triton
import triton.language as tl

from .common import dot, rounded
from .launch import call, cdiv, launcher, next_power_of_2


def tile(B: int, H: int, itemsize: int) -> dict[str, int]:
    """Sentences, channels and depth of a program's product, small so that there are many programs.
    Each thread has 16 bytes of a full tile."""
    BB = max(16, next_power_of_2(min(B, 32)))
    BK = min(128 // itemsize, max(16, next_power_of_2(H)))
    return {"BB": BB, "BH": 16, "BK": BK, "num_warps": itemsize}


@triton.jit
def _logistic(b_x):
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0.0, b_e, 1.0) / (1.0 + b_e)


@triton.jit
def _tanh(b_x):
    """Uses the series near 0, where the form with exp would lose digits."""
    b_e = tl.exp(-2.0 * tl.abs(b_x))
    b_far = (1.0 - b_e) / (1.0 + b_e)
    b_s = b_x * b_x
    b_near = 0.021869488536155203
    b_near = b_near * b_s - 0.05396825396825397
    b_near = b_near * b_s + 0.13333333333333333
    b_near = b_near * b_s - 0.3333333333333333
    b_near = b_x + b_x * b_s * b_near
    return tl.where(b_s < 0.09, b_near, tl.where(b_x < 0.0, -b_far, b_far))


@triton.jit
def _place(p_lengths, step, T, B, BB: tl.constexpr, REVERSE: tl.constexpr):
    """For a program's sentences, as int64: the index, the steps left including this one, whether
    this is the first step, the row in (T, B), and the distance in rows from step to step."""
    o_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    b_n = tl.zeros((BB,), dtype=tl.int64) + T
    if p_lengths is not None:
        b_n = tl.minimum(tl.maximum(tl.load(p_lengths + o_b, mask=o_b < B, other=0), 0), T)
    b_n = tl.where(o_b < B, b_n, 0)
    b_step = tl.zeros((BB,), dtype=tl.int64) + step
    o_t = b_n - 1 - b_step if REVERSE else b_step
    return o_b, b_n - b_step, b_step == 0, o_t * B + o_b, -B if REVERSE else B


@triton.jit
def _load(p_x, o_row, m, s_row: tl.constexpr, o_d, H: tl.constexpr):
    """(rows, channels) in fp32, 0 where the mask is false."""
    mask = m[:, None] & (o_d < H)[None, :]
    return tl.load(p_x + o_row[:, None] * s_row + o_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(p_x, b_x, o_row, m, s_row: tl.constexpr, o_d, H: tl.constexpr):
    mask = m[:, None] & (o_d < H)[None, :]
    tl.store(
        p_x + o_row[:, None] * s_row + o_d[None, :], rounded(b_x, p_x.dtype.element_ty), mask=mask
    )


@triton.jit
def _eye(p_peephole, q: tl.constexpr, o_d, H: tl.constexpr):
    return tl.load(p_peephole + q * H + o_d, mask=o_d < H, other=0.0)[None, :]


@triton.jit(do_not_specialize=["step", "depth", "T", "B"])
def peephole_lstm_fwd_kernel(
    p_f, p_w, p_peephole, p_before, p_lengths, p_h, p_h_last, p_c_last, p_c, p_gates,
    step, depth, T, B,
    H: tl.constexpr, REVERSE: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One step. ``p_before`` is h, or h0 in the first step. A ``depth`` of 0 skips the product."""
    o_b, b_left, b_first, o_row, s_step = _place(p_lengths, step, T, B, BB, REVERSE)
    m = b_left > 0
    o_d = tl.program_id(1) * BH + tl.arange(0, BH)
    o_before = tl.where(b_first, o_b, o_row - s_step)
    b_z = tl.zeros((BB, BH), dtype=tl.float32)
    b_rho = tl.zeros((BB, BH), dtype=tl.float32)
    b_phi = tl.zeros((BB, BH), dtype=tl.float32)
    b_pi = tl.zeros((BB, BH), dtype=tl.float32)
    for k in range(0, depth, BK):
        o_k = k + tl.arange(0, BK)
        m_h = m[:, None] & (o_k < H)[None, :]
        b_h = tl.load(p_before + o_before[:, None] * H + o_k[None, :], mask=m_h, other=0.0)
        p_k = p_w + o_k[:, None] * (4 * H) + o_d[None, :]
        m_w = (o_k < H)[:, None] & (o_d < H)[None, :]
        b_z = dot(b_h, tl.load(p_k, mask=m_w, other=0.0), b_z)
        b_rho = dot(b_h, tl.load(p_k + H, mask=m_w, other=0.0), b_rho)
        b_phi = dot(b_h, tl.load(p_k + 2 * H, mask=m_w, other=0.0), b_phi)
        b_pi = dot(b_h, tl.load(p_k + 3 * H, mask=m_w, other=0.0), b_pi)

    b_c = _load(p_c_last, o_b, m, H, o_d, H)
    b_value = _tanh(b_z + _load(p_f, o_row, m, 4 * H, o_d, H))
    b_rho += _load(p_f + H, o_row, m, 4 * H, o_d, H)
    b_enter = _logistic(b_rho + _eye(p_peephole, 0, o_d, H) * b_c)
    b_phi += _load(p_f + 2 * H, o_row, m, 4 * H, o_d, H)
    b_stay = _logistic(b_phi + _eye(p_peephole, 1, o_d, H) * b_c)
    b_c = b_value * b_enter + b_stay * b_c
    b_pi += _load(p_f + 3 * H, o_row, m, 4 * H, o_d, H)
    b_leave = _logistic(b_pi + _eye(p_peephole, 2, o_d, H) * b_c)
    b_h = _tanh(b_c) * b_leave
    _store(p_h, b_h, o_row, m, H, o_d, H)
    _store(p_h_last, b_h, o_b, b_left == 1, H, o_d, H)
    _store(p_c_last, b_c, o_b, m, H, o_d, H)
    if p_c is not None:
        _store(p_c, b_c, o_row, m, H, o_d, H)
        _store(p_gates, b_value, o_row, m, 4 * H, o_d, H)
        _store(p_gates + H, b_enter, o_row, m, 4 * H, o_d, H)
        _store(p_gates + 2 * H, b_stay, o_row, m, 4 * H, o_d, H)
        _store(p_gates + 3 * H, b_leave, o_row, m, 4 * H, o_d, H)


@triton.jit
def _add(p_sum, b_x, o_d, H: tl.constexpr):
    b_sum = tl.load(p_sum + o_d, mask=o_d < H, other=0.0) + tl.sum(b_x, 0)
    tl.store(p_sum + o_d, b_sum, mask=o_d < H)


@triton.jit(do_not_specialize=["step", "T", "B"])
def peephole_lstm_bwd_kernel(
    p_dh, p_dh_last, p_w, p_peephole, p_c0, p_lengths, p_c, p_gates, p_df, p_dc, p_sums,
    step, T, B,
    H: tl.constexpr, REVERSE: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One step. ``p_dc`` (B, H) is passed from step to step. ``p_sums`` has three rows for each
    program of the first axis, and every step adds to them."""
    o_b, b_left, b_first, o_row, s_step = _place(p_lengths, step, T, B, BB, REVERSE)
    m = b_left > 0
    o_d = tl.program_id(1) * BH + tl.arange(0, BH)
    b_dh = tl.zeros((BB, BH), dtype=tl.float32)
    # The last step has no next df.
    depth = tl.where(step + 1 < T, 4 * H, 0)
    for k in range(0, depth, BK):
        o_k = k + tl.arange(0, BK)
        m_z = (b_left > 1)[:, None] & (o_k < 4 * H)[None, :]
        o_next = (o_row + s_step)[:, None] * (4 * H) + o_k[None, :]
        b_dz = tl.load(p_df + o_next, mask=m_z, other=0.0)
        m_w = (o_d < H)[:, None] & (o_k < 4 * H)[None, :]
        b_w = tl.load(p_w + o_d[:, None] * (4 * H) + o_k[None, :], mask=m_w, other=0.0)
        b_dh = dot(b_dz, tl.trans(b_w), b_dh)
    if p_dh is not None:
        b_dh += _load(p_dh, o_row, m, H, o_d, H)
    if p_dh_last is not None:
        b_dh += _load(p_dh_last, o_b, b_left == 1, H, o_d, H)

    b_before = _load(p_c, o_row - s_step, m & ~b_first, H, o_d, H)
    if p_c0 is not None:
        b_before += _load(p_c0, o_b, m & b_first, H, o_d, H)
    b_now = _load(p_c, o_row, m, H, o_d, H)
    b_value = _load(p_gates, o_row, m, 4 * H, o_d, H)
    b_enter = _load(p_gates + H, o_row, m, 4 * H, o_d, H)
    b_stay = _load(p_gates + 2 * H, o_row, m, 4 * H, o_d, H)
    b_leave = _load(p_gates + 3 * H, o_row, m, 4 * H, o_d, H)
    b_top = _tanh(b_now)
    b_dpi = b_dh * b_top * b_leave * (1.0 - b_leave)
    b_dc = _load(p_dc, o_b, m, H, o_d, H) + b_dh * b_leave * (1.0 - b_top * b_top)
    b_dc += b_dpi * _eye(p_peephole, 2, o_d, H)
    b_drho = b_dc * b_value * b_enter * (1.0 - b_enter)
    b_dphi = b_dc * b_before * b_stay * (1.0 - b_stay)
    b_dvalue = b_dc * b_enter * (1.0 - b_value * b_value)
    _store(p_df, b_dvalue, o_row, m, 4 * H, o_d, H)
    _store(p_df + H, b_drho, o_row, m, 4 * H, o_d, H)
    _store(p_df + 2 * H, b_dphi, o_row, m, 4 * H, o_d, H)
    _store(p_df + 3 * H, b_dpi, o_row, m, 4 * H, o_d, H)
    b_dc = b_dc * b_stay + b_drho * _eye(p_peephole, 0, o_d, H)
    _store(p_dc, b_dc + b_dphi * _eye(p_peephole, 1, o_d, H), o_b, m, H, o_d, H)
    p_sums += tl.program_id(0) * (3 * H)
    _add(p_sums, b_drho * b_before, o_d, H)
    _add(p_sums + H, b_dphi * b_before, o_d, H)
    _add(p_sums + 2 * H, b_dpi * b_now, o_d, H)


def _start(state, first):
    state.zero_() if first is None else state.copy_(first)


@launcher
def peephole_lstm_forward(a):
    T, B, H = a.h.shape
    sides = tile(B, H, a.f.element_size())
    for out in (a.h, a.c, a.gates):
        if out is not None and a.lengths is not None:
            out.zero_()
    _start(a.h_last, a.h0)
    _start(a.c_last, a.c0)
    grid = (cdiv(B, sides["BB"]), cdiv(H, sides["BH"]))
    for step in range(T):
        before = a.h if step or a.h0 is None else a.h0
        depth = 0 if before is a.h and step == 0 else H
        call(
            peephole_lstm_fwd_kernel, grid,
            a.f, a.weight, a.peephole, before, a.lengths, a.h, a.h_last, a.c_last, a.c, a.gates,
            step, depth, T, B, H=H, REVERSE=a.reverse, **sides,
        )  # fmt: skip


@launcher
def peephole_lstm_backward(a):
    T, B, H = a.c.shape
    sides = tile(B, H, a.df.element_size())
    if a.lengths is not None:
        a.df.zero_()
    dc = a.c.new_empty(B, H) if a.dc0 is None else a.dc0
    _start(dc, a.dc_last)
    grid = (cdiv(B, sides["BB"]), cdiv(H, sides["BH"]))
    sums = a.c.new_zeros(max(1, grid[0]), 3, H)
    for step in reversed(range(T)):
        call(
            peephole_lstm_bwd_kernel, grid,
            a.dh, a.dh_last, a.weight, a.peephole, a.c0, a.lengths, a.c, a.gates, a.df, dc, sums,
            step, T, B, H=H, REVERSE=a.reverse, **sides,
        )  # fmt: skip
    a.dpeephole.copy_(sums.sum(0))
    if a.dh0 is None:
        return
    # A sentence of length 0 has df = 0, and its last h is h0 itself.
    n = a.dh0.new_full((B,), T, dtype=torch.int64) if a.lengths is None else a.lengths.clamp(0, T)
    o_first = (n - 1).clamp(min=0) if a.reverse else n * 0
    first = a.df.new_zeros(B, 4 * H)
    if T:
        first = a.df.gather(0, o_first.view(1, B, 1).expand(1, B, 4 * H))[0]
    d = first.float() @ a.weight.float().T
    if a.dh_last is not None:
        d = d + a.dh_last.float().where((n == 0).unsqueeze(1), 0.0)
    a.dh0.copy_(d)
