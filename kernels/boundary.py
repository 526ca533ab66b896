"""The boundary between two layers: everything between their matrix products in one pass.

    forward    y = residual + dropout(branch); slot k gets n_k, the layer normalisation of y
               x = partial + sum over near j of W[k, j] * z_j,  out = LN(x)
               with z_j = n_j * norm_weight_j + norm_bias_j
    backward   g = dx + the gradient of dout through LN, stored for the boundaries below
               u = pulled + sum_l W[l, k] * g_l,  dW[l, k] = <g_l, z_k>
               dy from u, through the state's norm weight, normalisation and dropout

Every row reads the norm weights of the near states, from the L1 cache, in the layout in which a
thread has its 16 or 32 bytes of a row. The near states but k, and the pulled rows and slots but row
k's, are arithmetic progressions, as in every pattern of DLCL, and are passed as three numbers each.
"""

import triton
import triton.language as tl

from .common import (
    STAGES,
    dropout,
    even_programs,
    flat_rows,
    load_again,
    load_rows,
    load_stat,
    multiprocessors,
    norm_backward,
    normalise,
    output_backward,
    passed_near,
    passed_pulls,
    progressions,
    residency,
    rounded,
    row_channels,
    row_tile,
    store_output,
    store_rows,
    store_stat,
    store_sum,
    store_tile,
)
from .launch import cdiv, launch, launcher, next_power_of_2
from .sums import Sum, sum_partials


@triton.jit
def _load_weight(b_x, p_weight, pair, D, o_d, m, VECTOR: tl.constexpr):
    """W at a (row, state) pair: a scalar, or one per channel of the tile ``b_x``."""
    if VECTOR:
        return load_again(b_x, p_weight + pair * D + o_d, m)
    else:
        return tl.load(p_weight + pair, eviction_policy="evict_last")


@triton.jit
def _mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m):
    """z_k = n_k * norm_weight_k + norm_bias_k in fp32."""
    b_z = b_n.to(tl.float32)
    if p_norm_weight is not None:
        b_z *= load_again(b_z, p_norm_weight + k * D + o_d, m)
    if p_norm_bias is not None:
        b_z += load_again(b_z, p_norm_bias + k * D + o_d, m)
    return b_z


@triton.jit
def _add_state(
    b_x, b_n, p_weight, p_norm_weight, p_norm_bias, row, k, R, D, o_d, m, VECTOR: tl.constexpr
):
    """``x + W[row, k] * (n_k * norm_weight_k + norm_bias_k)`` of n_k, a tile in registers."""
    b_z = _mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m)
    return b_x + _load_weight(b_z, p_weight, row * R + k, D, o_d, m, VECTOR) * b_z


@triton.jit
def _far_and_near(
    p_partial, p_states, p_weight, p_norm_weight, p_norm_bias, row, first, step, count, R,
    s_partial, s_states, s1_states, o_row, o_d, m, D,
    VECTOR: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``partial + sum over near of W[row, k] * (n_k * norm_weight_k + norm_bias_k)``."""
    b_x = tl.zeros((BA, BT, BC), dtype=tl.float32)
    if p_partial is not None:
        b_x += load_rows(p_partial + o_row * s_partial + o_d, m, BA, BT, BC).to(tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        k = (first + i * step).to(tl.int64)
        b_n = load_rows(p_states + k * s_states + o_row * s1_states + o_d, m, BA, BT, BC)
        if i < count:
            b_x = _add_state(
                b_x, b_n, p_weight, p_norm_weight, p_norm_bias, row, k, R, D, o_d, m, VECTOR
            )
    return b_x


@triton.jit
def _add_dot(
    b_dots, p_dots, i, begun, b_g, b_z, o_c, m_c, D,
    VECTOR: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Adds <g, z> of a tile to entry i of the program's dW.

    A scalar is summed in each thread's registers until the end. A vector does not fit there, so it
    is summed in a buffer of this program. ``begun``: the buffer has a sum.
    """
    if VECTOR:
        p = p_dots + i * D + o_c
        b_dot = tl.sum(b_g * b_z, axis=1)[:, None, :]
        # Another thread may have written these elements for the previous tile.
        tl.debug_barrier()
        if begun:
            b_dot += tl.load(p, mask=m_c, other=0.0)
        tl.store(p, b_dot, mask=m_c)
    else:
        b_dot = tl.reshape(tl.sum(b_g * b_z, axis=0), (1, BT, BC // 8, 8))
        o_i = tl.arange(0, b_dots.shape[0])[:, None, None]
        b_dots += tl.where(o_i == i, tl.sum(b_dot, axis=3), 0.0)
    return b_dots


FORWARD_NUMBERS = ["T", "threshold", "k", "first", "step", "count"]
# Each state has its entry in a table of all layers, which begins anywhere.
ENTRIES = ["p_seed", "p_source_rstd", "p_out_mean", "p_out_rstd"]


@triton.jit(do_not_specialize=FORWARD_NUMBERS, do_not_specialize_on_alignment=ENTRIES)
def boundary_fwd_kernel(
    p_branch, p_residual, p_seed, p_states, p_weight, p_norm_weight, p_norm_bias, p_partial,
    p_out_norm_weight, p_out_norm_bias, p_x, p_out, p_source_rstd, p_out_mean, p_out_rstd,
    T, R, k, first, step, count, source_eps, out_eps, threshold, scale,
    s_branch, s_residual, s_states, s1_states, s_partial, s_x, s_out,
    NORM_SOURCE: tl.constexpr, SOURCE_RMS: tl.constexpr, OUT_RMS: tl.constexpr,
    READS_OWN: tl.constexpr, VECTOR: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BT
    o_t = begin + tl.arange(0, BT)
    m_t, m_c = o_t < T, row_channels(BA, BC) < D
    o_row, o_d, m = flat_rows(begin, T, D, BA, BT, BC)
    k = k.to(tl.int64)
    p_own = p_states + k * s_states
    # Loaded now, so that they arrive while the near states are summed.
    if p_branch is not None:
        b_y = load_rows(p_branch + o_row * s_branch + o_d, m, BA, BT, BC)
        if p_residual is not None:
            b_r = load_rows(p_residual + o_row * s_residual + o_d, m, BA, BT, BC)
    b_x = _far_and_near(
        p_partial, p_states, p_weight, p_norm_weight, p_norm_bias, k, first, step, count, R,
        s_partial, s_states, s1_states, o_row, o_d, m, D, VECTOR, BA, BT, BC,
    )  # fmt: skip
    if p_branch is not None:
        b_y = dropout(b_y.to(tl.float32), p_seed, o_t, threshold, scale, BA, BT, BC)
        if p_residual is not None:
            b_y += b_r.to(tl.float32)
        if NORM_SOURCE:
            b_y, _, b_rstd = normalise(b_y, m_c, D, source_eps, SOURCE_RMS)
            store_stat(p_source_rstd, b_rstd, o_t, m_t)
        # Mixes the rounded state, which is what later rows read.
        b_n = rounded(b_y, p_states.dtype.element_ty)
        store_rows(p_own + o_row * s1_states + o_d, b_n, m, BA, BT, BC)
    elif READS_OWN:
        b_n = load_rows(p_own + o_row * s1_states + o_d, m, BA, BT, BC)
    if READS_OWN:
        b_x = _add_state(b_x, b_n, p_weight, p_norm_weight, p_norm_bias, k, k, R, D, o_d, m, VECTOR)
    store_tile(p_x, s_x, o_row, o_d, m, b_x)
    if p_out is not None:
        store_output(
            b_x, p_out, p_out_norm_weight, p_out_norm_bias, p_out_mean, p_out_rstd, s_out,
            o_t, o_row, o_d, m_t, m_c, m, D, out_eps, OUT_RMS,
        )  # fmt: skip


BACKWARD_NUMBERS = [
    "T", "threshold", "k", "grad_slot", "first", "step", "count", "first_row",
    "row_step", "first_slot", "slot_step", "pulls",
]  # fmt: skip


@triton.jit(do_not_specialize=BACKWARD_NUMBERS, do_not_specialize_on_alignment=ENTRIES)
def boundary_bwd_kernel(
    p_states, p_weight, p_norm_weight, p_norm_bias, p_partial, p_out_norm_weight,
    p_source_rstd, p_out_mean, p_out_rstd, p_seed, p_dx, p_dout, p_grads, p_pulled, p_dbranch,
    p_dresidual, p_dots, p_sums,
    T, R, k, grad_slot, first, step, count, first_row, row_step, first_slot,
    slot_step, pulls, threshold, scale,
    s_states, s1_states, s_partial, s_dx, s_dout, s_grads, s1_grads, s_pulled, s_dbranch,
    s_dresidual,
    NORM_SOURCE: tl.constexpr, SOURCE_RMS: tl.constexpr, OUT_RMS: tl.constexpr,
    READS_OWN: tl.constexpr,
    PULLS_OWN: tl.constexpr, VECTOR: tl.constexpr, NP: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_c = row_channels(BA, BC)
    m_c = o_c < D
    k = k.to(tl.int64)
    p_g = p_grads + grad_slot.to(tl.int64) * s_grads
    program = tl.program_id(0).to(tl.int64)
    if p_dots is not None:
        p_dots += program * (pulls + PULLS_OWN) * (D if VECTOR else 1)
    b_dots = tl.zeros((NP, BT, BC // 8), dtype=tl.float32)
    # Sums over this program's tokens, and every block below: (BA, BT, BC).
    b_dnorm_weight = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_dnorm_bias = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_dout_norm_weight = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_dout_norm_bias = tl.zeros((BA, BT, BC), dtype=tl.float32)
    for begin in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        o_t = begin + tl.arange(0, BT)
        m_t = o_t < T
        o_row, o_d, m = flat_rows(begin, T, D, BA, BT, BC)
        # Used last, but loaded now, so that they arrive while the near states are summed.
        b_n = load_rows(p_states + k * s_states + o_row * s1_states + o_d, m, BA, BT, BC)
        b_source_rstd = load_stat(p_source_rstd, o_t, m_t) if NORM_SOURCE else None
        if p_dx is not None:
            b_dx = load_rows(p_dx + o_row * s_dx + o_d, m, BA, BT, BC)
        b_g = tl.zeros((BA, BT, BC), dtype=tl.float32)
        if p_dout is not None:
            b_d = load_rows(p_dout + o_row * s_dout + o_d, m, BA, BT, BC)
            b_rstd = load_stat(p_out_rstd, o_t, m_t)
            b_mean = None if OUT_RMS else load_stat(p_out_mean, o_t, m_t)
            b_x = _far_and_near(
                p_partial, p_states, p_weight, p_norm_weight, p_norm_bias, k, first, step, count, R,
                s_partial, s_states, s1_states, o_row, o_d, m, D, VECTOR, BA, BT, BC,
            )  # fmt: skip
            if READS_OWN:
                b_x = _add_state(
                    b_x, b_n, p_weight, p_norm_weight, p_norm_bias, k, k, R, D, o_d, m, VECTOR
                )
            b_d, b_dw, b_db = output_backward(
                b_d, b_x, b_mean, b_rstd, p_out_norm_weight, o_d, m_c, m, D, OUT_RMS
            )
            if p_sums is not None:
                b_dout_norm_weight += b_dw
                b_dout_norm_bias += b_db
            b_g += b_d
        if p_dx is not None:
            b_g += b_dx.to(tl.float32)
        # Computed again rather than kept, because until here every register is in use.
        b_z = _mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m)
        b_n = b_n.to(tl.float32)
        b_u = tl.zeros((BA, BT, BC), dtype=tl.float32)
        # Loaded here, because above its fp32 values would be too many for the registers.
        if p_pulled is not None:
            b_u += load_rows(p_pulled + o_row * s_pulled + o_d, m, BA, BT, BC)
        o_grad = o_row * s1_grads + o_d
        store_rows(p_g + o_grad, b_g, m, BA, BT, BC)
        begun = begin >= tl.num_programs(0) * BT
        # u = pulled + sum_l W[l, k] g_l and dW[l, k] = <g_l, z_k> over the rows l of the block. The
        # gradient of row k itself is still in registers.
        if PULLS_OWN:
            b_u += _load_weight(b_u, p_weight, k * R + k, D, o_d, m, VECTOR) * b_g
            if p_dots is not None:
                b_dots = _add_dot(b_dots, p_dots, 0, begun, b_g, b_z, o_c, m_c, D, VECTOR, BT, BC)
        for i in tl.range(0, pulls, num_stages=STAGES):
            slot_l = (first_slot + i * slot_step).to(tl.int64)
            b_gl = load_rows(p_grads + slot_l * s_grads + o_grad, m, BA, BT, BC).to(tl.float32)
            if i < pulls:
                pair = (first_row + i * row_step).to(tl.int64) * R + k
                b_u += _load_weight(b_u, p_weight, pair, D, o_d, m, VECTOR) * b_gl
                if p_dots is not None:
                    b_dots = _add_dot(
                        b_dots, p_dots, i + PULLS_OWN, begun, b_gl, b_z, o_c, m_c, D, VECTOR, BT, BC
                    )
        if p_sums is not None:
            b_dnorm_weight += b_u * b_n
            b_dnorm_bias += b_u
        if p_norm_weight is not None:
            b_u *= load_again(b_u, p_norm_weight + k * D + o_d, m)
        b_y = norm_backward(b_u, b_n, b_source_rstd, D, SOURCE_RMS) if NORM_SOURCE else b_u
        store_tile(p_dresidual, s_dresidual, o_row, o_d, m, b_y)
        b_y = dropout(b_y, p_seed, o_t, threshold, scale, BA, BT, BC)
        store_tile(p_dbranch, s_dbranch, o_row, o_d, m, b_y)
    if p_dots is not None and not VECTOR:
        o_i = tl.arange(0, NP)
        b_dot = tl.sum(tl.sum(b_dots, axis=2), axis=1)
        tl.store(p_dots + o_i, b_dot, mask=o_i < pulls + PULLS_OWN)
    if p_sums is not None:
        p = p_sums + program * 4 * D + o_c
        store_sum(p, b_dnorm_weight, m_c)
        store_sum(p + D, b_dnorm_bias, m_c)
        store_sum(p + 2 * D, b_dout_norm_weight, m_c)
        store_sum(p + 3 * D, b_dout_norm_bias, m_c)


@launcher
def boundary_forward(a):
    _, T, D = a.states.shape
    near = passed_near("boundary", tuple(a.near), a.k)
    itemsize = a.states.element_size()
    tile = row_tile(D, itemsize, per_thread=16 // itemsize, num_warps=8)
    launch(
        boundary_fwd_kernel, (cdiv(T, tile.BT),), a, T=T, R=a.weight.shape[0], **near,
        VECTOR=a.weight.dim() == 3, D=D, **tile._asdict(),
    )  # fmt: skip


@launcher
def boundary_backward(a):
    _, T, D = a.states.shape
    device, vector = a.states.device, a.weight.dim() == 3
    near = passed_near("boundary", tuple(a.near), a.k)
    rows, pulls = passed_pulls("boundary", tuple(a.pull_rows), tuple(a.pull_slots), a.k)
    itemsize = a.states.element_size()
    # Fewer threads than in forward, with more registers for what they sum over the tokens.
    tile = row_tile(D, itemsize, per_thread=32 // itemsize, num_warps=4)
    programs, registers = residency(8, tile.num_warps)
    programs = even_programs(cdiv(T, tile.BT), programs * multiprocessors(device))
    dots = sums = None
    if a.dweight is not None and rows:
        dots = a.weight.new_empty(programs, len(rows), D if vector else 1)
    channels = (a.dnorm_weight, a.dnorm_bias, a.dout_norm_weight, a.dout_norm_bias)
    if any(d is not None for d in channels):
        sums = a.weight.new_empty(programs, 4, 1, D)
    launch(
        boundary_bwd_kernel, (programs,), a, p_dots=dots, p_sums=sums, T=T, R=a.weight.shape[0],
        **near, **pulls, VECTOR=vector, NP=max(8, next_power_of_2(len(rows))), D=D,
        maxnreg=registers, **tile._asdict(),
    )  # fmt: skip
    parts = [] if dots is None else _dot_sums(dots, a.dweight, rows, a.k)
    if sums is not None:
        sum_partials(sums, *channels, more=parts.pop() if parts else None)
    for part in parts:
        sum_partials(part.partial[:, None], part.out)


def _dot_sums(dots, dweight, rows, column) -> list[Sum]:
    """The programs' parts of ``dweight[rows, column]``: a sum for each progression of rows."""
    (step, *strides), N = dweight.stride(), dots.shape[2]
    first = dweight.storage_offset() + column * strides[0]
    pieces = progressions(rows, limit=len(rows))
    parts = [dots] if len(pieces) == 1 else dots.split([piece[0] for piece in pieces], 1)
    return [
        Sum(part, dweight.as_strided((count, N), (steps * step, 1), first + row * step))
        for part, (count, (row, steps)) in zip(parts, pieces, strict=True)
    ]
