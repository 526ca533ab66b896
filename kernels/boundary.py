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
    RowTile,
    dropout,
    even_programs,
    flat_rows,
    load_rows,
    multiprocessors,
    norm_backward,
    normalise,
    passed_near,
    passed_pulls,
    residency,
    rounded,
    row_channels,
    row_tile,
    store_rows,
    store_sum,
)
from .launch import cdiv, launch, launcher, next_power_of_2
from .near_sum import (
    STAGES,
    add_dot,
    add_state,
    load_again,
    load_stat,
    load_weight,
    mixed,
    near_sum,
    output_backward,
    store_output,
    store_stat,
    store_tile,
)
from .sums import Sum, sum_partials


def forward_tile(D: int, itemsize: int) -> RowTile:
    return row_tile(D, itemsize, per_thread=16 // itemsize, num_warps=8)


def backward_tile(D: int, itemsize: int) -> RowTile:
    """Fewer threads than in forward, with more registers for what they sum over the tokens."""
    return row_tile(D, itemsize, per_thread=32 // itemsize, num_warps=4)


FORWARD_NUMBERS = ["T", "threshold", "k", "first", "step", "count"]
# Each state has its entry in a table of all layers, which begins anywhere.
ENTRIES = ["p_seed", "p_source_rstd", "p_out_mean", "p_out_rstd"]


@triton.jit(do_not_specialize=FORWARD_NUMBERS, do_not_specialize_on_alignment=ENTRIES)
def boundary_fwd_kernel(
    p_branch, p_residual, p_seed, p_states, p_weight, p_norm_weight, p_norm_bias, p_partial,
    p_out_norm_weight, p_out_norm_bias, p_x, p_out, p_source_rstd, p_out_mean, p_out_rstd,
    T, R, k, first, step, count, source_eps, out_eps, threshold, scale,
    s_branch, s_residual, s_n, s_state, s_partial, s_x, s_out,
    NORM_SOURCE: tl.constexpr, SOURCE_RMS: tl.constexpr, OUT_RMS: tl.constexpr,
    READS_OWN: tl.constexpr, VECTOR: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BT
    o_t = begin + tl.arange(0, BT)
    m_t, m_c = o_t < T, row_channels(BA, BC) < D
    o_row, o_d, m = flat_rows(begin, T, D, BA, BT, BC)
    k = k.to(tl.int64)
    p_own = p_states + k * s_n
    # Loaded now, so that they arrive while the near states are summed.
    if p_branch is not None:
        b_y = load_rows(p_branch + o_row * s_branch + o_d, m, BA, BT, BC)
        if p_residual is not None:
            b_r = load_rows(p_residual + o_row * s_residual + o_d, m, BA, BT, BC)
    b_x = tl.zeros((BA, BT, BC), dtype=tl.float32)
    if p_partial is not None:
        b_x += load_rows(p_partial + o_row * s_partial + o_d, m, BA, BT, BC).to(tl.float32)
    b_x = near_sum(
        b_x, p_states, p_weight, p_norm_weight, p_norm_bias, k, first, step, count, R,
        s_n, s_state, o_row, o_d, m, D, VECTOR,
    )  # fmt: skip
    if p_branch is not None:
        b_y = b_y.to(tl.float32)
        if p_seed is not None:
            b_y = dropout(b_y, p_seed, o_t.to(tl.int64), threshold, scale, BA, BT, BC)
        if p_residual is not None:
            b_y += b_r.to(tl.float32)
        if NORM_SOURCE:
            b_y, _, b_rstd = normalise(b_y, m_c, D, source_eps, SOURCE_RMS)
            store_stat(p_source_rstd, b_rstd, o_t, m_t)
        # Mixes the rounded state, which is what later rows read.
        b_n = rounded(b_y, p_states.dtype.element_ty)
        store_rows(p_own + o_row * s_state + o_d, b_n, m, BA, BT, BC)
    elif READS_OWN:
        b_n = load_rows(p_own + o_row * s_state + o_d, m, BA, BT, BC)
    if READS_OWN:
        b_x = add_state(b_x, b_n, p_weight, p_norm_weight, p_norm_bias, k, k, R, D, o_d, m, VECTOR)
    store_tile(p_x, s_x, o_row, o_d, m, b_x)
    if p_out is not None:
        store_output(
            b_x, p_out, p_out_norm_weight, p_out_norm_bias, p_out_mean, p_out_rstd, s_out,
            o_t, o_row, o_d, m_t, m_c, m, D, out_eps, OUT_RMS,
        )  # fmt: skip


@triton.jit
def _pull(
    b_u, b_dots, b_g, b_z, p_weight, p_grads, p_dots,
    k, first_row, row_step, first_slot, slot_step, pulls, R, begun, s_grads,
    o_grad, o_c, o_d, m_c, m,
    PULLS_OWN: tl.constexpr, VECTOR: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``u + sum_l W[l, k] g_l`` and ``dW[l, k] = <g_l, z_k>`` over the rows l of the block.

    The gradient of row k itself, ``b_g``, is still in registers. u, g and z are (BA, BT, BC), the
    sums of dW (NP, BT, BC // 8).
    """
    if PULLS_OWN:
        b_u += load_weight(b_u, p_weight, k * R + k, D, o_d, m, VECTOR) * b_g
        if p_dots is not None:
            b_dots = add_dot(b_dots, p_dots, 0, begun, b_g, b_z, o_c, m_c, D, VECTOR, BT, BC)
    for i in tl.range(0, pulls, num_stages=STAGES):
        slot_l = (first_slot + i * slot_step).to(tl.int64)
        b_gl = load_rows(p_grads + slot_l * s_grads + o_grad, m, BA, BT, BC).to(tl.float32)
        if i < pulls:
            pair = (first_row + i * row_step).to(tl.int64) * R + k
            b_u += load_weight(b_u, p_weight, pair, D, o_d, m, VECTOR) * b_gl
            if p_dots is not None:
                b_dots = add_dot(
                    b_dots, p_dots, i + PULLS_OWN, begun, b_gl, b_z, o_c, m_c, D, VECTOR, BT, BC
                )
    return b_u, b_dots


@triton.jit
def _state_backward(
    b_u, b_n, b_rstd, p_norm_weight, k, o_d, m,
    NORM_SOURCE: tl.constexpr, SOURCE_RMS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dy from dz_k, through the state's norm_weight and normalisation."""
    if p_norm_weight is not None:
        b_u *= load_again(b_u, p_norm_weight + k * D + o_d, m)
    return norm_backward(b_u, b_n, b_rstd, D, SOURCE_RMS) if NORM_SOURCE else b_u


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
    s_n, s_state, s_partial, s_dx, s_dout, s_grads, s_grad, s_pulled, s_dbranch, s_dresidual,
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
        b_n = load_rows(p_states + k * s_n + o_row * s_state + o_d, m, BA, BT, BC)
        b_source_rstd = load_stat(p_source_rstd, o_t, m_t) if NORM_SOURCE else None
        if p_dx is not None:
            b_dx = load_rows(p_dx + o_row * s_dx + o_d, m, BA, BT, BC)
        b_g = tl.zeros((BA, BT, BC), dtype=tl.float32)
        if p_dout is not None:
            b_d = load_rows(p_dout + o_row * s_dout + o_d, m, BA, BT, BC)
            b_rstd = load_stat(p_out_rstd, o_t, m_t)
            b_mean = None if OUT_RMS else load_stat(p_out_mean, o_t, m_t)
            b_x = tl.zeros((BA, BT, BC), dtype=tl.float32)
            if p_partial is not None:
                b_x += load_rows(p_partial + o_row * s_partial + o_d, m, BA, BT, BC).to(tl.float32)
            b_x = near_sum(
                b_x, p_states, p_weight, p_norm_weight, p_norm_bias, k, first, step, count, R,
                s_n, s_state, o_row, o_d, m, D, VECTOR,
            )  # fmt: skip
            if READS_OWN:
                b_x = add_state(
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
        b_z = mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m)
        b_n = b_n.to(tl.float32)
        b_u = tl.zeros((BA, BT, BC), dtype=tl.float32)
        # Loaded here, because above its fp32 values would be too many for the registers.
        if p_pulled is not None:
            b_u += load_rows(p_pulled + o_row * s_pulled + o_d, m, BA, BT, BC)
        o_grad = o_row * s_grad + o_d
        store_rows(p_g + o_grad, b_g, m, BA, BT, BC)
        begun = begin >= tl.num_programs(0) * BT
        b_u, b_dots = _pull(
            b_u, b_dots, b_g, b_z, p_weight, p_grads, p_dots,
            k, first_row, row_step, first_slot, slot_step, pulls, R, begun, s_grads,
            o_grad, o_c, o_d, m_c, m, PULLS_OWN, VECTOR, D, BA, BT, BC,
        )  # fmt: skip
        if p_sums is not None:
            b_dnorm_weight += b_u * b_n
            b_dnorm_bias += b_u
        b_y = _state_backward(
            b_u, b_n, b_source_rstd, p_norm_weight, k, o_d, m, NORM_SOURCE, SOURCE_RMS, D
        )
        store_tile(p_dresidual, s_dresidual, o_row, o_d, m, b_y)
        if p_dbranch is not None and p_seed is not None:
            b_y = dropout(b_y, p_seed, o_t.to(tl.int64), threshold, scale, BA, BT, BC)
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
    tile = forward_tile(D, a.states.element_size())
    launch(
        boundary_fwd_kernel, (cdiv(T, tile.BT),), a, T=T, R=a.weight.shape[0], **near,
        s_n=a.states.stride(0), s_state=a.states.stride(1),
        VECTOR=a.weight.dim() == 3, D=D, **tile._asdict(),
    )  # fmt: skip


@launcher
def boundary_backward(a):
    _, T, D = a.states.shape
    device, vector = a.states.device, a.weight.dim() == 3
    near = passed_near("boundary", tuple(a.near), a.k)
    pulls = passed_pulls("boundary", tuple(a.pull_rows), tuple(a.pull_slots), a.k)
    tile = backward_tile(D, a.states.element_size())
    programs, registers = residency(8, tile.num_warps)
    programs = even_programs(cdiv(T, tile.BT), programs * multiprocessors(device))
    dots = sums = None
    if a.dweight is not None and pulls.rows:
        dots = a.weight.new_empty(programs, len(pulls.rows), D if vector else 1)
    channels = (a.dnorm_weight, a.dnorm_bias, a.dout_norm_weight, a.dout_norm_bias)
    if any(d is not None for d in channels):
        sums = a.weight.new_empty(programs, 4, 1, D)
    launch(
        boundary_bwd_kernel, (programs,), a, p_dots=dots, p_sums=sums, T=T,
        R=a.weight.shape[0], **near, **pulls.numbers,
        s_n=a.states.stride(0), s_state=a.states.stride(1), s_grad=a.grads.stride(1),
        VECTOR=vector, NP=max(8, next_power_of_2(len(pulls.rows))), D=D, **tile._asdict(),
        maxnreg=registers,
    )  # fmt: skip
    parts = [] if dots is None else _dot_sums(dots, a.dweight, pulls, a.k)
    if sums is not None:
        sum_partials(sums, *channels, more=parts.pop() if parts else None)
    for part in parts:
        sum_partials(part.partial[:, None], part.out)


def _dot_sums(dots, dweight, pulls, column) -> list[Sum]:
    """The programs' parts of ``dweight[rows, column]``; for a progression they are one sum."""
    (step, *strides), N = dweight.stride(), dots.shape[2]
    first = dweight.storage_offset() + column * strides[0]

    def out(row, count, steps):
        return dweight.as_strided((count, N), (steps * step, 1), first + row * step)

    if pulls.steps is not None:
        row, steps, count = pulls.steps
        return [Sum(dots, out(row, count, steps))]
    return [Sum(dots[:, i : i + 1], out(row, 1, 1)) for i, row in enumerate(pulls.rows)]
