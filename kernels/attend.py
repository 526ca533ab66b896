"""Parts of the kernels of attention residuals: scores, online softmax, and their backward.

    forward    x_l = sum_k p_lk v_k,  p_lk = exp(s_lk - most_l) / total_l, or relu(s_lk)
               s_lk = q_l . n_k + b_lk,  n_k = v_k r_k,  r_k = 1 / sqrt(mean(v_k^2) + eps)
    backward   ds_lk = p_lk (<g_l, v_k> - <g_l, x_l>), or <g_l, v_k> where s_lk > 0
               dv_k = sum_l (p_lk g_l + ds_lk r_k (q_l - n_k (q_l . n_k) / D))
               dq_l = sum_k ds_lk n_k,  db_lk = ds_lk,  summed over the tokens

with the largest score most_l and total_l = sum_k exp(s_lk - most_l). The softmax is computed online
(Milakov, Gimelshein 2018).

A tile (BA, BT, BC) has all channels of BT tokens, see `common`. Statistics of tokens are (R, T)
tables, contiguous. They are loaded as (1, BT, 1) blocks.
"""

import triton
import triton.language as tl

from .common import load_rows, row_sum
from .near_sum import STAGES, load_stat


@triton.jit
def slot(first, i, step):
    """Entry i of a progression, as a factor of a stride."""
    return (first + i * step).to(tl.int64)


@triton.jit
def rms_norm(b_v, D, eps):
    """1 / RMS of each row of a (BA, BT, BC) tile, (1, BT, 1)."""
    return tl.rsqrt(row_sum(b_v * b_v) / D + eps)


@triton.jit
def load_query(p_query, row, o_d, D, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The query of a row, (BA, BT, BC)."""
    return load_rows(p_query + row * D + o_d, o_d < D, BA, BT, BC)


@triton.jit
def relu(b_s):
    """NaN stays NaN."""
    return tl.where(b_s <= 0, 0.0, b_s)


@triton.jit
def begin_sum(b_x, p_most, p_total, o_t, m_t):
    """A weighted mean ``b_x`` as `join` continues it: the sum, the largest score, the total."""
    b_most, b_total = load_stat(p_most, o_t, m_t), load_stat(p_total, o_t, m_t)
    return b_x * b_total, b_most, b_total


@triton.jit
def no_sum(BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The result of `begin_sum` of no states."""
    b_most = tl.full((1, BT, 1), float("-inf"), dtype=tl.float32)
    b_total = tl.zeros((1, BT, 1), dtype=tl.float32)
    return tl.zeros((BA, BT, BC), dtype=tl.float32), b_most, b_total


@triton.jit
def join(b_x, b_most, b_total, b_s, b_v, RELU: tl.constexpr):
    """The sum after one more state v, (BA, BT, BC), with the scores s."""
    if RELU:
        b_x += relu(b_s) * b_v
    else:
        b_high = tl.maximum(b_most, b_s)
        # The difference of two scores of -inf is NaN, but their weights must be 0.
        b_from = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_kept, b_p = tl.exp(b_most - b_from), tl.exp(b_s - b_from)
        b_x = b_x * b_kept + b_p * b_v
        b_total = b_total * b_kept + b_p
        b_most = b_high
    return b_x, b_most, b_total


@triton.jit
def end_sum(b_x, b_total, RELU: tl.constexpr):
    """The weighted mean; 0 where nothing has a weight."""
    return b_x if RELU else b_x / tl.where(b_total == 0, 1.0, b_total)


@triton.jit
def join_states(
    b_x, b_most, b_total, b_q, p_states, p_bias, p_rstd, row, first, step, count, T, R,
    s_n, s_state, o_t, o_row, o_d, m_t, m,
    RELU: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`join` of a progression of states."""
    p_states += o_row * s_state + o_d
    for i in tl.range(0, count, num_stages=STAGES):
        k = slot(first, i, step)
        b_v = load_rows(p_states + k * s_n, m, BA, BT, BC).to(tl.float32)
        b_s = row_sum(b_v * b_q) * load_stat(p_rstd + k * T, o_t, m_t)
        if p_bias is not None:
            b_s += tl.load(p_bias + row * R + k)
        b_x, b_most, b_total = join(b_x, b_most, b_total, b_s, b_v, RELU)
    return b_x, b_most, b_total


@triton.jit
def pull(b_u, b_back, b_v, b_r, b_g, b_q, b_bias, b_most, b_total, b_delta,
         RELU: tl.constexpr):  # fmt: skip
    """Adds what a row gives to dv of a tile of a state v, (BA, BT, BC), and returns its ds.

    b_g, b_q: the row's gradient and query, (BA, BT, BC). b_back: the sum of ds (q . n) so far.
    This and further blocks are (1, BT, 1).
    """
    b_dot = row_sum(b_v * b_q) * b_r
    b_s, b_ds = b_dot + b_bias, row_sum(b_v * b_g)
    if RELU:
        b_p = relu(b_s)
        b_ds = tl.where(b_s > 0, b_ds, 0.0)
    else:
        b_p = tl.exp(b_s - b_most) / b_total
        b_ds = b_p * (b_ds - b_delta)
    b_u += b_p * b_g + b_ds * b_r * b_q
    return b_u, b_back + b_ds * b_dot, b_ds


@triton.jit
def pull_rows(
    b_u, b_back, b_v, b_r, p_grads, p_query, p_bias, p_stats, p_ds,
    first_row, step_row, first_slot, step_slot, rows, k, L, T, R,
    s_grads, s_grad, o_t, o_row, o_d, m_t, m, RELU: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`pull` of a progression of rows. ``p_ds`` gets ds, (T, L)."""
    p_grads += o_row * s_grad + o_d
    for i in tl.range(0, rows, num_stages=STAGES):
        row = slot(first_row, i, step_row)
        b_g = load_rows(p_grads + slot(first_slot, i, step_slot) * s_grads, m, BA, BT, BC)
        b_q = tl.zeros((BA * BT, BC), dtype=tl.float32)
        b_bias, b_most, b_total, b_delta = 0.0, 0.0, 1.0, 0.0
        if i < rows:
            b_q = tl.load(
                p_query + row * D + o_d, mask=o_d < D, other=0.0, eviction_policy="evict_last"
            )
        if p_bias is not None:
            b_bias = tl.load(p_bias + row * R + k)
        if not RELU:
            p_row = p_stats + row * 3 * T
            b_most, b_total = load_stat(p_row, o_t, m_t), load_stat(p_row + T, o_t, m_t, 1.0)
            b_delta = load_stat(p_row + 2 * T, o_t, m_t)
        b_u, b_back, b_ds = pull(
            b_u, b_back, b_v, b_r, b_g.to(tl.float32), tl.reshape(b_q, (BA, BT, BC)),
            b_bias, b_most, b_total, b_delta, RELU,
        )  # fmt: skip
        if p_ds is not None:
            tl.store(p_ds + o_t.to(tl.int64) * L + i, tl.reshape(b_ds, (BT,)), mask=m_t)
    return b_u, b_back


@triton.jit
def end_pull(b_u, b_back, b_v, b_r, D):
    """dv, through 1 / RMS."""
    return b_u - b_v * (b_r * b_r * b_back / D)
