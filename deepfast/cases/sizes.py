"""The calls that kernels must pass, at sizes that fit no block or vector, and typical ones."""

from collections.abc import Iterator

import torch

from deepfast.cases import ops, sentences, stacks
from deepfast.cases.case import Case, Rows, Sizes, Typical

# Enough tokens that a multiprocessor gets several rows; without a GPU as few as possible.
QUICK = {"cuda": Sizes(1023, 255, 512, 100), "cpu": Sizes(5, 17, 32, 20)}
THOROUGH = {
    "cuda": (Sizes(1, 1, 8, 36), Sizes(8191, 1023, 4096, 1000, 70)),
    "cpu": (Sizes(1, 1, 8, 36),),
}


KERNELS = ops.KERNELS | stacks.KERNELS | sentences.KERNELS
"""By the ops of `deepfast.backend.OPS`: the calls that their kernels must pass."""

LISTED = {op: calls.listed for op, calls in KERNELS.items()} | ops.PRODUCTS
"""The calls at odd sizes, also of ops that combine such kernels with torch's matrix products."""


LENGTHS = (64, 512, 4096)
"""Longest sentences at which attention is timed: tiles that suit one do not suit another."""

WIDTHS = (512, 1024, 4096)
"""Channels of a row at which other ops are timed; of an LSTM half as many."""


def widths(op: str, kind: str) -> tuple[int, ...]:
    """Sizes at which an op is timed on devices of type ``kind``; small on a CPU, for tests."""
    at: tuple[int, ...] = LENGTHS if op == "attention" else WIDTHS
    at = at if kind == "cuda" else tuple(3 + n // 128 for n in at)
    return tuple(w // 2 for w in at) if op == "peephole_lstm" else at


def typical(op: str, width: int, kind: str, tokens: int | None = None) -> Case:
    """A typical call at ``width`` on a device of type ``kind``. By default it has as many tokens as
    are timed: enough that a kernel takes longer than its launch."""
    T = tokens or ((1 << 23) // width if kind == "cuda" else 2)
    few = tokens is not None
    return KERNELS[op].typical(Typical(f"width {width}", Rows((T,), width), kind == "cuda", few))


def cases(op: str, kind: str, widths: tuple[int, ...], thorough: bool = False) -> Iterator[Case]:
    """The calls that backends must pass on devices of type ``kind``: odd sizes, then typical
    ``widths``, with fewer tokens than are timed."""
    torch.manual_seed(1)
    for sizes in (QUICK[kind], *(THOROUGH[kind] if thorough else ())):
        yield from KERNELS[op].listed(sizes)
    for width in widths:
        yield typical(op, width, kind, tokens=256 if kind == "cuda" else 2)
