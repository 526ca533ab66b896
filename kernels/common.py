"""Code that all kernel files share.

Names in all of them: ``p_`` a pointer, ``o_`` an offset, ``b_`` a loaded block, ``m_``
a mask, ``s_`` a stride in elements. T tokens, D channels, K sources, R rows of the depth weights;
BT, BD, BK the sides of a tile. A launcher takes the operands of its
launch as one record (`deepfast.launches`), computes what the function of its name in
`deepfast.reference` computes, and checks nothing. It writes into tensors that the caller
allocates. A missing operand is None, and Triton compiles a variant for it. A parameter ``p_NAME``
of a kernel is the operand NAME where the launcher says nothing else: see `launch`.

Kernels that hold whole rows use tiles (BA, BT, BC): BT tokens with BA * BC channels, where (a, c)
is channel ``a * BC + c``. Triton spreads BC over the threads of a row, 16 bytes each, BT over
further warps, and BA over registers. A plain (BT, BD) tile would spread each row over all warps.
Such a tile is loaded and stored as (BA * BT, BC), see `flat_rows`, because with three sides Triton
3.6 would spread BA over warps. D is a constexpr, so that rows without a remainder need no mask.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


SOURCES = tl.constexpr(16)
"""Tensors that a launch takes as a tuple."""


def launcher(launch: Callable[..., None]) -> Callable[..., None]:
    """Decorates a launcher: its kernels run on the device of its operands.

    Triton launches on the current device, whatever the device of the tensors that it is given.
    """

    @functools.wraps(launch)
    def run(a):
        x = next(x for x in a if isinstance(x, torch.Tensor))
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launch(a)
        with torch.cuda.device(x.get_device()):
            return launch(a)

    return run


class RowTile(NamedTuple):
    """The sides of a tile and the number of warps of a launch."""

    BA: int
    BT: int
    BC: int
    num_warps: int


def row_tile(D: int, itemsize: int, *, per_thread: int, num_warps: int) -> RowTile:
    """Tiles of whole rows with ``per_thread`` elements in each thread, more in very long rows."""
    BD = max(16, triton.next_power_of_2(D))
    warps_per_row = min(16, max(1, BD // (32 * per_thread)))
    num_warps = max(num_warps, warps_per_row)
    BC = min(BD, warps_per_row * 32 * (16 // itemsize))
    return RowTile(BD // BC, max(1, num_warps * 32 * per_thread // BD), BC, num_warps)


def dropout_factors(p: float) -> tuple[int, float]:
    """The smallest draw that is kept, and the factor of a kept element."""
    threshold = int(p * 65536 + 0.5)
    return threshold, 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; under the interpreter, a number for tests."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def stride(x: torch.Tensor | None) -> int:
    """The distance from row to row; 0 for a missing operand."""
    return 0 if x is None else x.stride(0)


@functools.cache
def _parameters(kernel) -> list[tuple[str, str, bool]]:
    """A kernel's parameters: the name, the operand's name, and whether it is a distance of rows."""
    return [
        (name, name[2:] if name.startswith(("p_", "s_")) else name.lower(), name.startswith("s_"))
        for name in kernel.arg_names
    ]


def launch(kernel, programs: tuple[int, ...], a, **given) -> None:
    """Launches a kernel with what ``given`` names, and with operands of the record ``a``.

    Of the parameters that ``given`` leaves out ``p_NAME`` is the operand NAME, ``s_NAME`` the
    distance of its rows, ``threshold`` and ``scale`` are those of the dropout, without which
    ``p_seed`` is None, and another parameter is the operand of its name in lower case.
    """
    if "threshold" in kernel.arg_names:
        given["threshold"], given["scale"] = dropout_factors(a.dropout_p)
        given.setdefault("p_seed", a.seed if a.dropout_p > 0 else None)
    for parameter, operand, is_stride in _parameters(kernel):
        if parameter not in given:
            x = getattr(a, operand)
            given[parameter] = stride(x) if is_stride else x
    kernel[programs](**given, enable_fp_fusion=True)


def source_group(tensors, first: int) -> tuple[torch.Tensor, ...]:
    """Up to 16 tensors, filled up with the first one: one compiled variant serves any number."""
    group = tuple(tensors[first : first + SOURCES.value])
    return group + group[:1] * (SOURCES.value - len(group))


def row_strides(tensors) -> tuple[int, ...]:
    return tuple(x.stride(0) for x in tensors)


def even_programs(tiles: int, most: int) -> int:
    """The fewest programs that finish ``tiles`` in as many rounds as ``most`` programs would."""
    return triton.cdiv(tiles, max(1, triton.cdiv(tiles, most)))


class Residency(NamedTuple):
    """Programs that run at once on a multiprocessor, and the registers left to each thread."""

    programs: int
    registers: int


def residency(warps: int, num_warps: int) -> Residency:
    """For ``warps`` per multiprocessor, which has 65536 registers, allocated in groups of eight."""
    programs = max(1, warps // num_warps)
    return Residency(programs, min(248, 65536 // (32 * num_warps * programs) // 8 * 8))


class Progression(NamedTuple):
    """Indices first, first + step, ..., passed by value: a launch copies no table to the device."""

    first: int
    step: int
    count: int


def progression(indices: list[int]) -> Progression | None:
    """``indices`` as an arithmetic progression; None where they are none."""
    first = indices[0] if indices else 0
    step = indices[1] - first if len(indices) > 1 else 1
    if any(i != first + n * step for n, i in enumerate(indices)):
        return None
    return Progression(first, step, len(indices))


def passed(op: str, name: str, indices: list[int]) -> Progression:
    """The operand ``name`` without k, as it is passed to a boundary's kernel."""
    known = progression(indices)
    if known is None:
        raise ValueError(f"{op}: {name} but k must be an arithmetic progression, got {indices}")
    return known


class Pulls(NamedTuple):
    """The rows of a block that pull a state, as a boundary's kernel takes them."""

    rows: list[int]
    """All of them, row k itself first."""
    numbers: dict[str, int]
    """The kernel's arguments: the progressions of the others, and whether row k is one."""


def passed_pulls(op: str, a) -> Pulls:
    """The kernel adds row k's own gradient first, from registers."""
    others = [(r, s) for r, s in zip(a.pull_rows, a.pull_slots, strict=True) if r != a.k]
    rows = [r for r, _ in others]
    first_row, row_step, pulls = passed(op, "pull_rows", rows)
    first_slot, slot_step, _ = passed(op, "pull_slots", [s for _, s in others])
    own = a.k in a.pull_rows
    numbers = {
        "first_row": first_row, "row_step": row_step, "first_slot": first_slot,
        "slot_step": slot_step, "pulls": pulls, "PULLS_OWN": own,
    }  # fmt: skip
    return Pulls([a.k] * own + rows, numbers)


def progressions(*columns, limit):
    """Splits parallel lists of ints into pieces in which each list is an arithmetic progression.

    A piece covers at most ``limit`` entries and is (its length, then (first, step) for each list).
    Empty lists give one empty piece.
    """
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
    return pieces or [(0, *[(0, 1)] * len(columns))]


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
def dropout(
    b_x, p_seed, o_t, threshold, scale, BA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    first=0,
):  # fmt: skip
    """Applies dropout to a (BA, BT, BC) tile: ``x * scale`` where kept, 0 elsewhere.

    Channel 8a + 2w + h of token t takes half h of word w of the Philox counter
    (a, t mod 2^32, t div 2^32, 0), see `deepfast.reference.dropout`.

    o_t: (BT,) int64, the tokens. first: the first channel of the tile, a multiple of 8.
    """
    groups = tl.arange(0, BA)[:, None, None] * (BC // 8) + tl.arange(0, BC // 8)[None, None, :]
    groups += first // 8
    zeros = tl.zeros((BA, BT, BC // 8), dtype=tl.uint32)
    low = (o_t & 0xFFFFFFFF).to(tl.uint32)[None, :, None] + zeros
    high = (o_t >> 32).to(tl.uint32)[None, :, None] + zeros
    w0, w1, w2, w3 = tl.philox(tl.load(p_seed), groups.to(tl.uint32) + zeros, low, high, zeros)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BA, BT, BC)).to(tl.int32)
    return tl.where(draws >= threshold, b_x * scale, 0.0)


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
def store_sum(p, b_x, m_d):
    """Stores the sum of a (BA, BT, BC) tile over its tokens; ``p`` and ``m_d`` are (BA, 1, BC)."""
    tl.store(p, tl.sum(b_x, axis=1)[:, None, :], mask=m_d)


@triton.jit
def row_sum(b_x):
    """(BA, BT, BC) summed over the channels: (1, BT, 1)."""
    return tl.sum(tl.sum(b_x, axis=0), axis=1)[None, :, None]


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
    b_rstd = tl.rsqrt(row_sum(b_x * b_x) / D + eps)
    return b_x * b_rstd, b_mean, b_rstd


@triton.jit
def norm_backward(b_dn, b_n, b_rstd, D, RMS: tl.constexpr = False):
    """dx of layer normalisation from dn, the gradient of its result n; dn and n are 0 outside D."""
    if RMS:
        return b_rstd * (b_dn - b_n * (row_sum(b_dn * b_n) / D))
    else:
        return b_rstd * (b_dn - row_sum(b_dn) / D - b_n * (row_sum(b_dn * b_n) / D))


@triton.jit
def _put_sum(p_out, o_out, b_out, m, ADD: tl.constexpr):
    if p_out is not None:
        if ADD:
            b_out += tl.load(p_out + o_out, mask=m, other=0.0)
        tl.store(p_out + o_out, b_out, mask=m)


@triton.jit(
    do_not_specialize=["P", "s_p", "s_out"],
    # Rows of a gradient of all layers begin anywhere.
    do_not_specialize_on_alignment=["p_out0", "p_out1", "p_out2", "p_out3"],
)
def sum_partials_kernel(
    p_partial, p_out0, p_out1, p_out2, p_out3,
    P, N,
    s_p, s_i, s_out,
    ADD: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(1), tl.program_id(2)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    p_partial += i * s_i + row * N
    b_sum = tl.zeros((BP, BN), dtype=tl.float32)
    for start in range(0, P, BP):
        o_p = start + tl.arange(0, BP).to(tl.int64)
        m = (o_p < P)[:, None] & (o_n < N)[None, :]
        b_sum += tl.load(p_partial + o_p[:, None] * s_p + o_n[None, :], mask=m, other=0.0)
    b_out = tl.sum(b_sum, axis=0)
    o_out = row.to(tl.int64) * s_out + o_n
    o_i = tl.zeros((BN,), dtype=tl.int32) + i
    _put_sum(p_out0, o_out, b_out, (o_n < N) & (o_i == 0), ADD)
    _put_sum(p_out1, o_out, b_out, (o_n < N) & (o_i == 1), ADD)
    _put_sum(p_out2, o_out, b_out, (o_n < N) & (o_i == 2), ADD)
    _put_sum(p_out3, o_out, b_out, (o_n < N) & (o_i == 3), ADD)


def sum_partials(partial: torch.Tensor, *outs: torch.Tensor | None, add: bool = False) -> None:
    """``outs[i] = partial[:, i].sum(0)`` in one launch, always in the same order.

    Args:
        partial: (P, I, R, N) fp32, contiguous: the parts of I <= 4 outputs from P programs.
        outs: (R, N) fp32, last stride 1, equal row strides; None for an output that is not needed.
        add: whether to add to what ``outs`` hold.
    """
    P, wanted, R, N = partial.shape
    s_out = next(out.stride(0) for out in outs if out is not None)
    outs = (*outs, None, None, None)[:4]
    # One output needs no stride between outputs; a 0 keeps Triton from compiling for its value.
    s_i = partial.stride(1) if wanted > 1 else 0
    BN = 16
    sum_partials_kernel[(triton.cdiv(N, BN), R, wanted)](
        partial, *outs, P, N, partial.stride(0), s_i, s_out, ADD=add, BP=256, BN=BN,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
