"""Parts of the boundaries' kernels: loads and stores of rows, the weights, and the sum

    b_x + sum over near of W[row, k] * (n_k * norm_weight_k + norm_bias_k)

over the states of the row's own block, and the layer-norm of the result.

Offsets ``o_row`` (tokens), ``o_d`` and masks ``m`` are flat, of `common.flat_rows`. ``o_c`` and
``m_c``, (BA, 1, BC), are channels.
"""

import triton
import triton.language as tl

from .common import load_rows, norm_backward, normalise, store_rows

STAGES = tl.constexpr(3)
"""Of a loop over states or gradients: two are copied ahead, to shared memory. Triton copies all
that a loop loads but under a condition, so loads of what the L1 cache has stand under one."""


@triton.jit
def load_again(b_x, p, m):
    """A tile (BA, BT, BC), as ``b_x`` is, that further tiles read too. ``p``, ``m``: flat."""
    b_y = tl.load(p, mask=m, other=0.0, eviction_policy="evict_last")
    return tl.reshape(b_y, b_x.shape)


@triton.jit
def store_tile(p, s_row, o_row, o_d, m, b_x):
    """Stores a tile rounded to the dtype of ``p``; nothing where ``p`` is None."""
    if p is not None:
        store_rows(p + o_row * s_row + o_d, b_x, m, b_x.shape[0], b_x.shape[1], b_x.shape[2])


@triton.jit
def load_stat(p, o_t, m_t, other=0.0):
    """One number for each token, as (1, BT, 1)."""
    return tl.load(p + o_t, mask=m_t, other=other)[None, :, None]


@triton.jit
def store_stat(p, b_stat, o_t, m_t):
    tl.store(p + o_t, tl.reshape(b_stat, o_t.shape), mask=m_t)


@triton.jit
def load_weight(b_x, p_weight, pair, D, o_d, m, VECTOR: tl.constexpr):
    """W at a (row, state) pair: a scalar, or one per channel of the tile ``b_x``."""
    if VECTOR:
        return load_again(b_x, p_weight + pair * D + o_d, m)
    else:
        return tl.load(p_weight + pair, eviction_policy="evict_last")


@triton.jit
def mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m):
    """z_k = n_k * norm_weight_k + norm_bias_k in fp32."""
    b_z = b_n.to(tl.float32)
    if p_norm_weight is not None:
        b_z *= load_again(b_z, p_norm_weight + k * D + o_d, m)
    if p_norm_bias is not None:
        b_z += load_again(b_z, p_norm_bias + k * D + o_d, m)
    return b_z


@triton.jit
def add_state(
    b_x, b_n, p_weight, p_norm_weight, p_norm_bias, row, k, R, D, o_d, m, VECTOR: tl.constexpr
):
    """``x + W[row, k] * (n_k * norm_weight_k + norm_bias_k)`` of n_k, a tile in registers."""
    b_z = mixed(b_n, p_norm_weight, p_norm_bias, k, D, o_d, m)
    return b_x + load_weight(b_z, p_weight, row * R + k, D, o_d, m, VECTOR) * b_z


@triton.jit
def near_sum(
    b_x, p_states, p_weight, p_norm_weight, p_norm_bias, row, first, step, count, R,
    s_n, s_state, o_row, o_d, m, D, VECTOR: tl.constexpr,
):  # fmt: skip
    """``b_x + sum over near of W[row, k] * (n_k * norm_weight_k + norm_bias_k)``."""
    for i in tl.range(0, count, num_stages=STAGES):
        k = (first + i * step).to(tl.int64)
        p_n = p_states + k * s_n + o_row * s_state + o_d
        b_n = load_rows(p_n, m, b_x.shape[0], b_x.shape[1], b_x.shape[2])
        if i < count:
            b_x = add_state(
                b_x, b_n, p_weight, p_norm_weight, p_norm_bias, row, k, R, D, o_d, m, VECTOR
            )
    return b_x


@triton.jit
def add_dot(
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


@triton.jit
def store_output(b_x, p_out, p_norm_weight, p_norm_bias, p_mean, p_rstd, s_out,
                 o_t, o_row, o_d, m_t, m_c, m, D, eps, RMS: tl.constexpr):  # fmt: skip
    """Stores ``out = LN(x)`` and its statistics."""
    b_out, b_mean, b_rstd = normalise(b_x, m_c, D, eps, RMS)
    if p_norm_weight is not None:
        b_out *= load_again(b_out, p_norm_weight + o_d, m)
    if p_norm_bias is not None:
        b_out += load_again(b_out, p_norm_bias + o_d, m)
    store_tile(p_out, s_out, o_row, o_d, m, b_out)
    if not RMS:
        store_stat(p_mean, b_mean, o_t, m_t)
    store_stat(p_rstd, b_rstd, o_t, m_t)


@triton.jit
def output_backward(b_dout, b_x, b_mean, b_rstd, p_norm_weight, o_d, m_c, m, D,
                    RMS: tl.constexpr):  # fmt: skip
    """Backward of ``out = LN(x)``: dx, and the terms of the gradients of weight and bias."""
    if not RMS:
        b_x -= b_mean
    b_hat = tl.where(m_c, b_x * b_rstd, 0.0)  # x normalised
    b_bias = b_dout.to(tl.float32)
    b_d = b_bias
    if p_norm_weight is not None:
        b_d *= load_again(b_d, p_norm_weight + o_d, m)
    return norm_backward(b_d, b_hat, b_rstd, D, RMS), b_bias * b_hat, b_bias
