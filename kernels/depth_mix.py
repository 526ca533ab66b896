"""Depth mixing (Wang et al. 2019, Eq. 8) over separate tensors.

    out = sum_k w_k z_k,  z_k = n_k * norm_weight_k + norm_bias_k,  n_k = LN(source_k) or source_k

    u_k = w_k * dout,  dsource_k = LN's backward of u_k * norm_weight_k,  dw_k = <dout, z_k>

A launch takes up to 16 sources as a tuple, so no table of pointers is copied to the device. Between
launches forward keeps the sum so far in fp32. In backward each source has its own programs, which
keep their sums over tokens for dw, dnorm_weight and dnorm_bias in registers.
"""

import torch
import triton
import triton.language as tl

from .common import (
    SOURCES,
    flat_rows,
    load_rows,
    load_stat,
    multiprocessors,
    norm_backward,
    normalise,
    pick,
    row_channels,
    row_tile,
    source_group,
    store_rows,
    store_stat,
    store_sum,
)
from .launch import cdiv, launch, launcher
from .sums import sum_partials


@triton.jit
def _weight_of(p_weight, k, o_d, m_d, D, PER_CHANNEL: tl.constexpr):
    if PER_CHANNEL:
        return tl.load(p_weight + k * D + o_d, mask=m_d, other=0.0)
    else:
        return tl.load(p_weight + k)


@triton.jit(do_not_specialize=["T", "K"])
def depth_mix_fwd_kernel(
    sources, p_weight, p_norm_weight, p_norm_bias, p_sum, p_out, p_mean, p_rstd,
    T, K, eps,
    s_sources, s_out,
    PER_CHANNEL: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BT
    o_row, o_flat, m = flat_rows(first, T, D, BA, BT, BC)
    o_d = row_channels(BA, BC)
    o_t = first + tl.arange(0, BT)
    m_t, m_d = o_t < T, o_d < D
    if p_sum is None:
        b_sum = tl.zeros((BA, BT, BC), dtype=tl.float32)
    else:
        b_sum = load_rows(p_sum + o_row * D + o_flat, m, BA, BT, BC)
    for k in tl.range(0, K, num_stages=STAGES):
        p_z = pick(sources, k) + o_row * pick(s_sources, k) + o_flat
        b_z = load_rows(p_z, m, BA, BT, BC).to(tl.float32)
        if p_mean is not None:
            b_z, b_mean, b_rstd = normalise(b_z, m_d, D, eps)
            o_stat = k * T.to(tl.int64) + o_t
            store_stat(p_mean, b_mean, o_stat, m_t)
            store_stat(p_rstd, b_rstd, o_stat, m_t)
        if p_norm_weight is not None:
            b_z *= tl.load(p_norm_weight + k * D + o_d, mask=m_d, other=0.0)
        if p_norm_bias is not None:
            b_z += tl.load(p_norm_bias + k * D + o_d, mask=m_d, other=0.0)
        b_sum += _weight_of(p_weight, k, o_d, m_d, D, PER_CHANNEL) * b_z
    store_rows(p_out + o_row * s_out + o_flat, b_sum, m, BA, BT, BC)


@triton.jit(do_not_specialize=["T", "K"])
def depth_mix_bwd_kernel(
    sources, p_weight, p_norm_weight, p_mean, p_rstd, p_dout, dsources, p_partial,
    T, K,
    s_sources, s_dout, s_dsources,
    PER_CHANNEL: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read the same dout, each for its own source.
    k, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    p_x, s_x = pick(sources, k), pick(s_sources, k)
    o_d = row_channels(BA, BC)
    m_d = o_d < D
    # The weights get one value per element of the tile, in its layout. Another layout would be
    # converted through shared memory in the loop.
    _, o_w, _ = flat_rows(0, T, D, BA, BT, BC)
    b_w = tl.zeros((BA * BT, BC), dtype=tl.float32)
    b_w += _weight_of(p_weight, k, o_w, o_w < D, D, PER_CHANNEL)
    if p_norm_weight is not None:
        b_w *= tl.load(p_norm_weight + k * D + o_w, mask=o_w < D, other=0.0)
    b_w = tl.reshape(b_w, (BA, BT, BC))
    b_gn = tl.zeros((BA, BT, BC), dtype=tl.float32)
    b_g = tl.zeros((BA, BT, BC), dtype=tl.float32)
    for start in tl.range(chunk * BT, T, chunks * BT, num_stages=STAGES):
        o_row, o_flat, m = flat_rows(start, T, D, BA, BT, BC)
        o_t = start + tl.arange(0, BT)
        m_t = o_t < T
        b_n = load_rows(p_x + o_row * s_x + o_flat, m, BA, BT, BC).to(tl.float32)
        b_dout = load_rows(p_dout + o_row * s_dout + o_flat, m, BA, BT, BC).to(tl.float32)
        if p_mean is not None:
            o_stat = k * T.to(tl.int64) + o_t
            b_mean, b_rstd = load_stat(p_mean, o_stat, m_t), load_stat(p_rstd, o_stat, m_t)
            b_n = tl.where(m_t[None, :, None] & m_d, (b_n - b_mean) * b_rstd, 0.0)
        if p_partial is not None:
            b_gn += b_dout * b_n
            b_g += b_dout
        if dsources is not None:
            b_u = b_w * b_dout
            if p_mean is not None:
                b_u = norm_backward(b_u, b_n, b_rstd, D)
            p_dx = pick(dsources, k) + o_row * pick(s_dsources, k) + o_flat
            store_rows(p_dx, b_u, m, BA, BT, BC)
    if p_partial is not None:
        p = p_partial + (chunk.to(tl.int64) * 2 * K + k) * D + o_d
        store_sum(p, b_gn, m_d)
        store_sum(p + K * D, b_g, m_d)


def _group(a, first: int) -> dict:
    """The kernels' arguments for the sources from ``first`` on."""
    mean, rstd = (a.mean, a.rstd) if a.norm else (None, None)
    tables = {"p_weight": a.weight, "p_norm_weight": a.norm_weight, "p_mean": mean, "p_rstd": rstd}
    given = {name: None if x is None else x[first:] for name, x in tables.items()}
    K = min(SOURCES.value, len(a.sources) - first)
    return given | source_group(a.sources, first) | {"K": K, "PER_CHANNEL": a.weight.dim() == 2}


@launcher
def depth_mix_forward(a):
    T, D = a.out.shape
    tile = row_tile(D, a.out.element_size(), per_thread=32, num_warps=4)
    more = len(a.sources) > SOURCES.value
    total = a.weight.new_empty(T, D) if more else None
    for first in range(0, len(a.sources), SOURCES.value):
        out = a.out if first + SOURCES.value >= len(a.sources) else total
        launch(
            depth_mix_fwd_kernel, (cdiv(T, tile.BT),), a, **_group(a, first),
            p_norm_bias=None if a.norm_bias is None else a.norm_bias[first:],
            p_sum=total if first else None, p_out=out, s_out=out.stride(0), T=T,
            STAGES=3 if D <= 2048 else 2, D=D, **tile._asdict(),
        )  # fmt: skip


@launcher
def depth_mix_backward(a):
    T, D = a.dout.shape
    tile = row_tile(D, a.dout.element_size(), per_thread=16, num_warps=4)
    # How many programs run at once with 168 registers per thread: 3 of 4 warps, 2 of 8, 1 of 16.
    programs = (1 + 8 // tile.num_warps) * multiprocessors(a.dout.device)
    want = [p for p in (a.dweight, a.dnorm_weight, a.dnorm_bias) if p is not None]
    sums = a.weight.new_empty(2, len(a.sources), D) if want else None
    for first in range(0, len(a.sources), SOURCES.value):
        group = _group(a, first)
        K = group["K"]
        chunks = min(cdiv(T, tile.BT), cdiv(programs, K))
        partial = a.weight.new_empty(chunks, 2, K, D) if want else None
        launch(
            depth_mix_bwd_kernel, (K, chunks), a, **group,
            **source_group(a.dsources, first, "dsources"), p_partial=partial, T=T,
            # Reading fp32 tiles ahead would not leave enough registers.
            STAGES=1 if a.dout.element_size() == 4 else 3,
            maxnreg=min(168, 2048 // tile.num_warps), D=D, **tile._asdict(),
        )  # fmt: skip
        if want:
            sum_partials(partial, *sums[:, first : first + K])
    if want:
        _weight_gradients(a, *sums)


def _weight_gradients(a, gn, g):
    """Weight gradients from gn and g, the sums over tokens of dout * n and of dout, (K, D) each."""
    w = a.weight if a.weight.dim() == 2 else a.weight[:, None]
    if a.dnorm_weight is not None:
        torch.mul(gn, w, out=a.dnorm_weight)
    if a.dnorm_bias is not None:
        torch.mul(g, w, out=a.dnorm_bias)
    if a.dweight is not None:
        d = gn if a.norm_weight is None else gn * a.norm_weight
        d = d if a.norm_bias is None else torch.addcmul(d, g, a.norm_bias)
        a.dweight.copy_(d if a.weight.dim() == 2 else d.sum(1))
