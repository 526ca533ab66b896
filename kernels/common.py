"""Code that all kernel files share.

Names in all of them: ``p_`` a pointer, ``o_`` an offset, ``b_`` a loaded block, ``m_`` a mask,
``s_`` a stride in elements. T tokens, D channels, K sources, R rows of the depth weights; BT, BD,
BK the sides of a tile. A launcher takes the operands of its launch as one record
(`deepfast.launches`), computes what the function of its name in `deepfast.reference` computes, and
checks nothing. It writes into tensors that the caller allocates. A missing operand is None, and
Triton compiles a variant for it. A parameter ``p_NAME`` of a kernel is the operand NAME where the
launcher says nothing else: see `launch`.

Kernels that hold whole rows use tiles (BA, BT, BC): BT tokens with BA * BC channels, where (a, c)
is channel ``a * BC + c``. Triton spreads BC over the threads of a row, 16 bytes each, BT over
further warps, and BA over registers. A plain (BT, BD) tile would spread each row over all warps.
Such a tile is loaded and stored as (BA * BT, BC), see `flat_rows`, because with three sides Triton
3.6 would spread BA over warps. Its tokens ``o_row``, channels ``o_d`` and mask ``m`` are then flat;
``o_c`` and ``m_c``, (BA, 1, BC), are channels of the tile. D is a constexpr, so that rows without a
remainder need no mask.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import cdiv, next_power_of_2

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


SOURCES = tl.constexpr(16)
"""Tensors that a launch takes as a tuple."""

STAGES = tl.constexpr(3)
"""Of a loop over states or gradients: two are copied ahead, to shared memory. Triton copies all
that a loop loads but under a condition, so loads of what the L1 cache has stand under one."""


class RowTile(NamedTuple):
    """The sides of a tile and the number of warps of a launch."""

    BA: int
    BT: int
    BC: int
    num_warps: int


@functools.cache
def row_tile(D: int, itemsize: int, *, per_thread: int, num_warps: int) -> RowTile:
    """Tiles of whole rows with ``per_thread`` elements in each thread, more in very long rows."""
    BD = max(16, next_power_of_2(D))
    warps_per_row = min(16, max(1, BD // (32 * per_thread)))
    num_warps = max(num_warps, warps_per_row)
    BC = min(BD, warps_per_row * 32 * (16 // itemsize))
    return RowTile(BD // BC, max(1, num_warps * 32 * per_thread // BD), BC, num_warps)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; under the interpreter, a number for tests."""
    return 2 if device.type != "cuda" else _properties(device.index).multi_processor_count


_properties = functools.cache(torch.cuda.get_device_properties)


def source_group(tensors, first: int, name: str = "sources") -> dict[str, Any]:
    """The kernels' arguments for up to 16 tensors from ``first`` on, None where there are none.
    They are filled up with the first one: one compiled variant serves any number."""
    group = tuple(tensors[first : first + SOURCES.value])
    group += group[:1] * (SOURCES.value - len(group))
    return {name: group or None, f"s_{name}": tuple(x.stride(0) for x in group) or None}


def even_programs(tiles: int, most: int) -> int:
    """The fewest programs that finish ``tiles`` in as many rounds as ``most`` programs would."""
    return cdiv(tiles, max(1, cdiv(tiles, most)))


@functools.cache
def residency(warps: int, num_warps: int) -> tuple[int, int]:
    """Programs that run at once on a multiprocessor, for ``warps`` in all, and the registers left
    to each thread: there are 65536, allocated in groups of eight."""
    programs = max(1, warps // num_warps)
    return programs, min(248, 65536 // (32 * num_warps * programs) // 8 * 8)


class Progression(NamedTuple):
    """Indices first, first + step, ..., passed by value: a launch copies no table to the device."""

    first: int
    step: int
    count: int


def progression(indices: list[int]) -> Progression | None:
    """``indices`` as an arithmetic progression; None where they form none."""
    first = indices[0] if indices else 0
    step = indices[1] - first if len(indices) > 1 else 1
    if any(i != first + n * step for n, i in enumerate(indices)):
        return None
    return Progression(first, step, len(indices))


def _passed(op: str, name: str, indices: list[int]) -> Progression:
    known = progression(indices)
    if known is None:
        raise ValueError(f"{op}: {name} but k must be an arithmetic progression, got {indices}")
    return known


@functools.cache
def passed_near(op: str, near: tuple[int, ...], k: int) -> dict[str, int]:
    """A boundary's kernel adds state k last, from registers: its arguments for the others."""
    others = _passed(op, "near", [j for j in near if j != k])
    return others._asdict() | {"READS_OWN": k in near}


@functools.cache
def passed_pulls(
    op: str, rows: tuple[int, ...], slots: tuple[int, ...], k: int
) -> tuple[list[int], dict[str, int]]:
    """The rows of a block that pull a state, and the kernel's arguments for them. The kernel adds
    row k's own gradient first, from registers."""
    others = [(row, slot) for row, slot in zip(rows, slots, strict=True) if row != k]
    first_row, row_step, pulls = _passed(op, "pull_rows", [row for row, _ in others])
    first_slot, slot_step, _ = _passed(op, "pull_slots", [slot for _, slot in others])
    return [k] * (k in rows) + [row for row, _ in others], {
        "first_row": first_row, "row_step": row_step, "first_slot": first_slot,
        "slot_step": slot_step, "pulls": pulls, "PULLS_OWN": k in rows,
    }  # fmt: skip


def progressions(*columns, limit):
    """Splits parallel lists of ints into pieces in which each list is an arithmetic progression.

    A piece covers at most ``limit`` entries and is (its length, then (first, step) for each list).
    Empty lists give one empty piece.
    """
    return _progressions(tuple(map(tuple, columns)), limit)


@functools.cache
def _progressions(columns, limit):
    size, start, pieces = len(columns[0]), 0, []
    while start < size:
        end, steps = start + 1, [1] * len(columns)
        while end < min(size, start + limit):
            here = [c[end] - c[end - 1] for c in columns]
            if min(here) < 1 or (end > start + 1 and here != steps):
                break
            end, steps = end + 1, here
        firsts = [c[start] for c in columns]
        pieces.append((end - start, *zip(firsts, steps, strict=True)))
        start = end
    return tuple(pieces) or ((0, *[(0, 1)] * len(columns)),)


@triton.jit
def pick(values, k):
    """values[k] of a tuple of `SOURCES` values, where k is known only at run time."""
    value = values[0]
    for i in tl.static_range(1, SOURCES):
        value = tl.where(k == i, values[i], value)
    return value


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """A tile rounded to the nearest value of a storage dtype."""
    # The interpreter truncates to bf16; a GPU rounds to nearest even.
    if INTERPRETED and dtype == tl.bfloat16 and b_x.dtype == tl.float32:
        bits = b_x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        b_x = tl.where(b_x == b_x, bits.to(tl.float32, bitcast=True), b_x)
    return b_x.to(dtype)


@triton.jit
def dot(b_a, b_b, b_sum=None):
    """``b_sum + b_a @ b_b`` in fp32; fp32 operands are not rounded to tf32."""
    # The interpreter multiplies the bits of bf16 numbers as integers.
    if INTERPRETED:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    if b_sum is None:
        return tl.dot(b_a, b_b, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, b_sum, input_precision="ieee")


@triton.jit
def _split(b_x):
    """An fp32 number as the nearest bf16 number and the fp32 rest."""
    b_high = rounded(b_x, tl.bfloat16)
    return b_high, b_x - b_high.to(tl.float32)


@triton.jit
def dot_weight(b_x, b_w, b_sum):
    """``b_sum + b_x @ b_w`` for bf16 x and fp32 w, of which three bf16 numbers hold the 24 bits."""
    b_high, b_w = _split(b_w)
    b_middle, b_w = _split(b_w)
    b_sum = dot(b_x, rounded(b_w, tl.bfloat16), b_sum)
    b_sum = dot(b_x, b_middle, b_sum)
    return dot(b_x, b_high, b_sum)


@triton.jit
def weight_dot(b_w, b_x, b_sum):
    """``b_sum + b_w @ b_x`` for fp32 w, as `dot_weight`; x of other dtypes becomes fp32."""
    if b_x.dtype == tl.bfloat16:
        b_high, b_w = _split(b_w)
        b_middle, b_w = _split(b_w)
        b_sum = dot(rounded(b_w, tl.bfloat16), b_x, b_sum)
        return dot(b_high, b_x, dot(b_middle, b_x, b_sum))
    else:
        return dot(b_w, b_x.to(tl.float32), b_sum)


@triton.jit
def dropout(
    b_x, p_seed, o_t, threshold, scale, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    first=0,
):  # fmt: skip
    """Applies dropout to a (BA, BT, BC) tile: ``x * scale`` where kept, 0 elsewhere. Without a seed
    it stays as it is.

    Channel 8a + 2w + h of token t takes half h of word w of the Philox counter
    (a, t mod 2^32, t div 2^32, 0), see `deepfast.reference.dropout`.

    o_t: (BT,), the tokens. first: the first channel of the tile, a multiple of 8.
    """
    if p_seed is not None:
        o_t = o_t.to(tl.int64)
        groups = tl.arange(0, BA)[:, None, None] * (BC // 8) + tl.arange(0, BC // 8)[None, None, :]
        groups += first // 8
        zeros = tl.zeros((BA, BT, BC // 8), dtype=tl.uint32)
        low = (o_t & 0xFFFFFFFF).to(tl.uint32)[None, :, None] + zeros
        high = (o_t >> 32).to(tl.uint32)[None, :, None] + zeros
        w0, w1, w2, w3 = tl.philox(tl.load(p_seed), groups.to(tl.uint32) + zeros, low, high, zeros)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        draws = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BA, BT, BC)).to(tl.int32)
        b_x = tl.where(draws >= threshold, b_x * scale, 0.0)
    return b_x


@triton.jit
def row_channels(BA: tl.constexpr, BC: tl.constexpr):
    """The channels of a tile of rows, (BA, 1, BC)."""
    return tl.arange(0, BA)[:, None, None] * BC + tl.arange(0, BC)[None, None, :]


@triton.jit
def flat_rows(first, T, D, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Tokens, channels and mask of BT tokens from ``first`` on: (BA * BT, BC), row a * BT + t."""
    o_r = tl.arange(0, BA * BT)[:, None]
    o_t, o_d = first + o_r % BT, o_r // BT * BC + tl.arange(0, BC)[None, :]
    return o_t.to(tl.int64), o_d, (o_t < T) & (o_d < D)


@triton.jit
def load_rows(p, m, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    return tl.reshape(tl.load(p, mask=m, other=0.0), (BA, BT, BC))


@triton.jit
def store_rows(p, b_x, m, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    tl.store(p, tl.reshape(rounded(b_x, p.dtype.element_ty), (BA * BT, BC)), mask=m)


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
def store_sum(p, b_x, m_d):
    """Stores the sum of a (BA, BT, BC) tile over its tokens; ``p`` and ``m_d`` are (BA, 1, BC)."""
    tl.store(p, tl.sum(b_x, axis=1)[:, None, :], mask=m_d)


@triton.jit
def row_sum(b_x):
    """(BA, BT, BC) summed over the channels: (1, BT, 1).

    First over BC, which ends with one number for each warp, whatever the layout: where warps share
    BA, a sum over it would go through shared memory, with eight accesses to each bank at a time.
    """
    return tl.sum(tl.sum(b_x, axis=2), axis=0)[None, :, None]


@triton.jit
def inverse_rms(b_x, D, eps):
    """1 / RMS of each row of a (BA, BT, BC) tile, (1, BT, 1)."""
    return tl.rsqrt(row_sum(b_x * b_x) / D + eps)


@triton.jit
def normalise(b_x, m_d, D, eps, RMS: tl.constexpr = False):
    """(x - mean) * rstd with mean and rstd, (1, BT, 1); channels outside ``m_d`` are 0.

    Two passes; the mean of x - mean corrects the mean, as in
    `deepfast.reference.layer_norm.normalise`. ``b_x`` must be 0 outside ``m_d``. With ``RMS`` the
    mean counts as 0.
    """
    if RMS:
        b_mean = tl.zeros([1, b_x.shape[1], 1], dtype=tl.float32)
    else:
        b_mean = row_sum(b_x) / D
        b_mean += row_sum(tl.where(m_d, b_x - b_mean, 0.0)) / D
        b_x = tl.where(m_d, b_x - b_mean, 0.0)
    b_rstd = inverse_rms(b_x, D, eps)
    return b_x * b_rstd, b_mean, b_rstd


@triton.jit
def norm_backward(b_dn, b_n, b_rstd, D, RMS: tl.constexpr = False):
    """dx of layer normalisation from dn, the gradient of its result n; dn and n are 0 outside D."""
    if RMS:
        return b_rstd * (b_dn - b_n * (row_sum(b_dn * b_n) / D))
    else:
        return b_rstd * (b_dn - row_sum(b_dn) / D - b_n * (row_sum(b_dn * b_n) / D))


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
