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

from .common import row_sum


@triton.jit
def slot(first, i, step):
    """Entry i of a progression, as a factor of a stride."""
    return (first + i * step).to(tl.int64)


@triton.jit
def relu(b_s):
    """NaN stays NaN."""
    return tl.where(b_s <= 0, 0.0, b_s)


@triton.jit
def no_sum(BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Of no states the sum, the largest score, and the total."""
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
