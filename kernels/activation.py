"""The activation of a feed-forward block, with the bias before it and the dropout after it.

    out = dropout(act(h + bias))
    dh = dropout(dout * act'(h + bias)),  dbias = sum of dh over the tokens

relu(h) = max(h, 0), gelu(h) = h Phi(h) (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).
relu's gradient reads only ``out``, which is 0 where relu or dropout made it 0, so it needs no mask.
A program reads its tile before it writes, so a result may overwrite an operand. Where dbias is
wanted, a program of backward has several tiles and keeps its part of dbias in registers.
"""

import triton
import triton.language as tl

from .common import dropout, even_programs, multiprocessors, residency, rounded
from .launch import cdiv, launch, launcher, next_power_of_2
from .sums import sum_partials


def tile(F: int, itemsize: int) -> dict[str, int]:
    """Channels and tokens of a program: 32 bytes of each operand for each of its 128 threads."""
    BF = min(256, max(16, next_power_of_2(F)))
    return {"BT": 4096 // itemsize // BF, "BF": BF, "num_warps": 4}


@triton.jit
def _place(tile, first, T, F: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr):
    """A tile from channel ``first`` on: its tokens, channels and mask, the tokens as (BT,)."""
    o_t = tile * BT + tl.arange(0, BT).to(tl.int64)
    o_f = (first + tl.arange(0, BF))[None, :]
    return o_t[:, None], o_f, (o_t[:, None] < T) & (o_f < F), o_t


@triton.jit
def _load(p_h, p_bias, s_h, o_row, o_f, m, F: tl.constexpr):
    """h + bias in fp32."""
    b_x = tl.load(p_h + o_row * s_h + o_f, mask=m, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_x += tl.load(p_bias + o_f, mask=o_f < F, other=0.0)
    return b_x


@triton.jit
def _dropped(b_x, p_seed, o_t, first, threshold, scale, BT: tl.constexpr, BF: tl.constexpr):
    b_x = tl.reshape(b_x, (1, BT, BF))
    b_x = dropout(b_x, p_seed, o_t, threshold, scale, 1, BT, BF, first)
    return tl.reshape(b_x, (BT, BF))


@triton.jit
def _normal(b_x):
    """Phi(x)."""
    return 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476))


@triton.jit(do_not_specialize=["T", "threshold"])
def activation_fwd_kernel(
    p_h, p_bias, p_seed, p_out,
    T, threshold, scale,
    s_h, s_out,
    F: tl.constexpr, RELU: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (F + BF - 1) // BF
    first = tl.program_id(0) % COLUMNS * BF
    o_row, o_f, m, o_t = _place(tl.program_id(0) // COLUMNS, first, T, F, BT, BF)
    b_x = _load(p_h, p_bias, s_h, o_row, o_f, m, F)
    if RELU:
        # tl.maximum(x, 0) would lose a NaN.
        b_x = tl.where(b_x < 0.0, 0.0, b_x)
    else:
        b_x *= _normal(b_x)
    b_x = _dropped(b_x, p_seed, o_t, first, threshold, scale, BT, BF)
    tl.store(p_out + o_row * s_out + o_f, rounded(b_x, p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "threshold"])
def activation_bwd_kernel(
    p_dout, p_saved, p_bias, p_seed, p_dh, p_partial,
    T, threshold, scale,
    s_dout, s_saved, s_dh,
    F: tl.constexpr, RELU: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (F + BF - 1) // BF
    first = tl.program_id(0) % COLUMNS * BF
    program, programs = tl.program_id(0) // COLUMNS, tl.num_programs(0) // COLUMNS
    b_sum = tl.zeros((BT, BF), dtype=tl.float32)
    for tile in range(program, tl.cdiv(T, BT), programs):
        o_row, o_f, m, o_t = _place(tile, first, T, F, BT, BF)
        b_x = _load(p_saved, p_bias, s_saved, o_row, o_f, m, F)
        b_d = tl.load(p_dout + o_row * s_dout + o_f, mask=m, other=0.0).to(tl.float32)
        if RELU:
            b_d = tl.where(b_x != 0.0, b_d * scale, 0.0)
        else:
            b_d *= _normal(b_x) + b_x * (0.3989422804014327 * tl.exp(-0.5 * b_x * b_x))
            b_d = _dropped(b_d, p_seed, o_t, first, threshold, scale, BT, BF)
        tl.store(p_dh + o_row * s_dh + o_f, rounded(b_d, p_dh.dtype.element_ty), mask=m)
        if p_partial is not None:
            b_sum += tl.where(m, b_d, 0.0)
    if p_partial is not None:
        o_f = first + tl.arange(0, BF)
        p_partial += program.to(tl.int64) * F
        tl.store(p_partial + o_f, tl.sum(b_sum, axis=0), mask=o_f < F)


@launcher
def activation_forward(a):
    T, F = a.h.shape
    sides = tile(F, a.h.element_size())
    programs = cdiv(T, sides["BT"]) * cdiv(F, sides["BF"])
    launch(activation_fwd_kernel, (programs,), a, T=T, F=F, RELU=a.kind == "relu", **sides)


@launcher
def activation_backward(a):
    T, F = a.dout.shape
    sides = tile(F, a.dout.element_size())
    rows, columns = cdiv(T, sides["BT"]), cdiv(F, sides["BF"])
    partial = registers = None
    if a.dbias is not None:
        most, registers = residency(24, sides["num_warps"])
        rows = even_programs(rows, cdiv(most * multiprocessors(a.dout.device), columns))
        partial = a.dbias.new_empty(rows, 1, 1, F)
    relu = a.kind == "relu"
    # The result of relu says where it and dropout made it 0.
    unread = {"p_bias": None, "p_seed": None} if relu else {}
    launch(
        activation_bwd_kernel, (rows * columns,), a, p_partial=partial, T=T, F=F, RELU=relu,
        maxnreg=registers, **unread, **sides,
    )  # fmt: skip
    if partial is not None:
        sum_partials(partial, a.dbias)
