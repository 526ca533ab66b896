"""Cross entropy of rows of logits with label smoothing; its gradient overwrites the logits.

    nll = log sum_v exp(x_v) - x_t,  loss = (1 - eps) * nll + eps * mean_v(log sum exp(x) - x_v)

    dx = softmax(x) - (1 - eps) * onehot(t) - eps / V,  zeros for an ignored target

Szegedy et al. 2016. One program per row of V logits makes three passes over it: the maximum, the
sums, the gradient. The logits were just written by a matrix product, so they come from the L2
cache. Whole blocks of BV have no mask: with one, an odd V would force accesses to single elements.
"""

import triton
import triton.language as tl

from .common import rounded
from .launch import launch, launcher, next_power_of_2

NUM_WARPS = 8
# Two accesses of 16 bytes for each thread, in 16 bits.
MOST = NUM_WARPS * 32 * 16


@triton.jit
def _add(b_x, m, b_max, b_exp, b_sum):
    """Adds a block to the sums of exp(x - max) and of x - max."""
    b_x = b_x.to(tl.float32) - b_max
    return b_exp + tl.where(m, tl.exp(b_x), 0.0), b_sum + tl.where(m, b_x, 0.0)


@triton.jit
def _gradient(b_x, b_max, scale, o_v, target, V, smoothing):
    b_d = tl.exp(b_x.to(tl.float32) - b_max) * scale - smoothing / V
    return rounded(b_d - tl.where(o_v == target, 1 - smoothing, 0.0), b_x.dtype)


@triton.jit(
    do_not_specialize=["ignore_index", "smoothing"],
    do_not_specialize_on_alignment=["p_target", "p_loss", "p_nll"],
)
def cross_entropy_kernel(
    p_logits, p_target, p_loss, p_nll,
    V, ignore_index, smoothing,
    s_logits,
    WRITE_GRAD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * s_logits
    target = tl.load(p_target + row)
    o_v = tl.arange(0, BV)
    full = V // BV * BV
    p_tail, m_tail = p_row + full + o_v, full + o_v < V
    if target == ignore_index:
        tl.store(p_loss + row, 0.0)
        tl.store(p_nll + row, 0.0)
        if WRITE_GRAD:
            b_zero = tl.zeros((BV,), dtype=p_row.dtype.element_ty)
            for start in range(0, full, BV):
                tl.store(p_row + start + o_v, b_zero)
            tl.store(p_tail, b_zero, mask=m_tail)
    else:
        # Read before the gradient overwrites it; a target out of range gives nan.
        inside = (target >= 0) & (target < V)
        hit = tl.load(p_row + target, mask=inside, other=float("nan")).to(tl.float32)
        b_most = tl.load(p_tail, mask=m_tail, other=float("-inf")).to(tl.float32)
        for start in range(0, full, BV):
            b_most = tl.maximum(b_most, tl.load(p_row + start + o_v).to(tl.float32))
        b_max = tl.max(b_most, axis=0)

        b_exp = tl.zeros((BV,), dtype=tl.float32)
        b_sum = tl.zeros((BV,), dtype=tl.float32)
        for start in range(0, full, BV):
            b_exp, b_sum = _add(tl.load(p_row + start + o_v), True, b_max, b_exp, b_sum)
        b_tail = tl.load(p_tail, mask=m_tail, other=0.0)
        b_exp, b_sum = _add(b_tail, m_tail, b_max, b_exp, b_sum)
        total = tl.sum(b_exp, axis=0)
        log_total = tl.log(total)
        nll = log_total - (hit - b_max)
        loss = nll
        if smoothing > 0:
            loss = (1 - smoothing) * nll + smoothing * (log_total - tl.sum(b_sum, axis=0) / V)
        tl.store(p_loss + row, loss)
        tl.store(p_nll + row, nll)

        if WRITE_GRAD:
            scale = 1.0 / total
            for start in range(0, full, BV):
                p, o = p_row + start + o_v, start + o_v
                b_x = tl.load(p)
                tl.store(p, _gradient(b_x, b_max, scale, o, target, V, smoothing))
            b_tail = tl.load(p_tail, mask=m_tail, other=0.0)
            b_d = _gradient(b_tail, b_max, scale, full + o_v, target, V, smoothing)
            tl.store(p_tail, b_d, mask=m_tail)


@launcher
def cross_entropy(a):
    T, V = a.logits.shape
    launch(
        cross_entropy_kernel, (T,), a, V=V, smoothing=a.label_smoothing,
        BV=min(MOST, max(16, next_power_of_2(V))), num_warps=NUM_WARPS,
    )  # fmt: skip
