"""Sums of the parts that the programs of a launch have written, in a fixed order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, call, cdiv

BP, BN = (4, 64) if INTERPRETED else (256, 16)
"""Parts and columns of a program at a time. The interpreter takes 20 ms for a program, and sums
parts in turns also at the sizes of tests."""


@triton.jit
def _put_sum(p_out, o_out, b_out, m, ADD: tl.constexpr):
    if p_out is not None:
        if ADD:
            b_out += tl.load(p_out + o_out, mask=m, other=0.0)
        tl.store(p_out + o_out, b_out, mask=m)


@triton.jit(
    do_not_specialize=[
        *("P", "R", "wanted", "s_p", "s_out"),
        *("more_P", "more_R", "s_more", "more_row", "more_column"),
    ],
    # Rows of a gradient of all layers begin anywhere.
    do_not_specialize_on_alignment=["p_out0", "p_out1", "p_out2", "p_out3", "p_more_out"],
)
def sum_partials_kernel(
    p_partial, p_out0, p_out1, p_out2, p_out3, p_more, p_more_out,
    P, N, R, wanted, more_P, more_R, more_N,
    s_p, s_i, s_out, s_more, more_row, more_column,
    ADD: tl.constexpr, MORE_ADD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(1), tl.program_id(2)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_r = tl.zeros((BN,), dtype=tl.int32) + row
    o_i = tl.zeros((BN,), dtype=tl.int32) + i
    m_n = (o_n < N) & (o_r < R) & (o_i < wanted)
    b_sum = tl.zeros((BP, BN), dtype=tl.float32)
    for start in range(0, P, BP):
        o_p = start + tl.arange(0, BP).to(tl.int64)
        m = (o_p < P)[:, None] & m_n[None, :]
        p = p_partial + i * s_i + row * N + o_p[:, None] * s_p + o_n[None, :]
        b_sum += tl.load(p, mask=m, other=0.0)
    b_out = tl.sum(b_sum, axis=0)
    o_out = row.to(tl.int64) * s_out + o_n
    _put_sum(p_out0, o_out, b_out, m_n & (o_i == 0), ADD)
    _put_sum(p_out1, o_out, b_out, m_n & (o_i == 1), ADD)
    _put_sum(p_out2, o_out, b_out, m_n & (o_i == 2), ADD)
    _put_sum(p_out3, o_out, b_out, m_n & (o_i == 3), ADD)
    if p_more is not None:
        # The last entry of the third axis.
        m_n = (o_n < more_N) & (o_r < more_R) & (o_i == wanted)
        b_sum = tl.zeros((BP, BN), dtype=tl.float32)
        for start in range(0, more_P, BP):
            o_p = start + tl.arange(0, BP).to(tl.int64)
            p = p_more + o_p[:, None] * s_more + row * more_N + o_n[None, :]
            b_sum += tl.load(p, mask=(o_p < more_P)[:, None] & m_n[None, :], other=0.0)
        o_out = row.to(tl.int64) * more_row + o_n.to(tl.int64) * more_column
        _put_sum(p_more_out, o_out, tl.sum(b_sum, axis=0), m_n, MORE_ADD)


class Sum(NamedTuple):
    """``out = partial.sum(0)``, added to it with ``add``."""

    partial: torch.Tensor
    """(P, R, N) fp32; all strides but the first are those of a contiguous tensor."""
    out: torch.Tensor
    """(R, N) fp32, of any strides."""
    add: bool = False


def sum_partials(
    partial: torch.Tensor, *outs: torch.Tensor | None, add: bool = False, more: Sum | None = None
) -> None:
    """``outs[i] = partial[:, i].sum(0)`` in one launch, always in the same order.

    Args:
        partial: (P, I, R, N) fp32, contiguous: the parts of I <= 4 outputs from P programs.
        outs: (R, N) fp32, last stride 1, equal row strides, or (N,) where R is 1; None for an
            output that is not needed.
        add: whether to add to what ``outs`` hold.
        more: a sum that the same launch computes.
    """
    P, wanted, R, N = partial.shape
    s_out = 0 if R == 1 else next(out.stride(0) for out in outs if out is not None)
    outs = (*outs, None, None, None)[:4]
    # One output needs no stride between outputs; a 0 keeps Triton from compiling for its value.
    s_i = partial.stride(1) if wanted > 1 else 0
    grid, more_sizes = (cdiv(N, BN), R, wanted), (0, 0, 0)
    p_more = p_more_out = None
    more_strides = 0, 0, 0
    if more is not None:
        p_more, p_more_out, more_sizes = more.partial, more.out, more.partial.shape
        more_strides = p_more.stride(0), *p_more_out.stride()
        grid = cdiv(max(N, more_sizes[2]), BN), max(R, more_sizes[1]), wanted + 1
    call(
        sum_partials_kernel, grid, partial, *outs, p_more, p_more_out, P, N, R, wanted, *more_sizes,
        partial.stride(0), s_i, s_out, *more_strides,
        ADD=add, MORE_ADD=more is not None and more.add, BP=BP, BN=BN, num_warps=4,
    )  # fmt: skip
