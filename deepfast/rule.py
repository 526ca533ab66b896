"""The table that chooses the default backend of an op on a GPU.

A line is: op, backend, bits of the dtypes, the lowest compute capability, the largest size. The
size of a call is the number of channels of a row; for attention it is the longest sentence. The
first line that matches is chosen. If no line matches, attention uses torch's sdpa, and the other
ops use the reference. `availability.why_unable` says what a backend cannot run at all.

The boundary in CUDA C++ comes before Triton's: its machine code loads the next rows while it
computes, and waits less for memory. Its far passes are Triton's in both. In attention Triton's
kernels read packed sentences, and sdpa pads them. Padding costs most where sentences are short. In
fp32 Triton's matmuls use no tensor cores, so sdpa is used. varlen has no dropout, so it is used
only on request. We have not measured these numbers on our own GPU yet: `deepfast selfcheck` prints
the times of all backends on yours. The kernels take any number of tokens, sources and rows, so
these counts do not change the choice. A kernel of Triton that holds whole rows has at most 512
threads for a row, and each of them has registers for 32 channels: together 16384.
"""

from typing import NamedTuple

import torch


class Line(NamedTuple):
    op: str
    backend: str
    bits: tuple[int, ...]
    capability: tuple[int, int]
    largest: float


ALL, HALF, AMPERE, ANY = (16, 32), (16,), (8, 0), float("inf")

LINES = (
    Line("layer_norm", "triton", ALL, AMPERE, 16384),
    Line("activation", "triton", ALL, AMPERE, ANY),
    Line("depth_mix", "triton", ALL, AMPERE, 16384),
    Line("depth_attention", "triton", ALL, AMPERE, 16384),
    Line("boundary", "cuda", ALL, AMPERE, 8192),
    Line("boundary", "triton", ALL, AMPERE, 16384),
    Line("attention_boundary", "triton", ALL, AMPERE, 16384),
    Line("linear_cross_entropy", "triton", ALL, AMPERE, ANY),
    Line("peephole_lstm", "triton", ALL, AMPERE, ANY),
    Line("attention", "triton", HALF, AMPERE, 512),
)

LENGTHS = tuple(int(line.largest) for line in LINES if line.op == "attention")
"""The lengths of sentences at which the choice for attention changes."""


def length_class(queries: int, keys: int) -> int:
    """A length that stands for all lengths of sentences with the same choice."""
    for most in LENGTHS:
        if queries <= most and keys <= most:
            return most
    return LENGTHS[-1] + 1


def why_not(
    op: str, backend: str, devices: list[int], dtype: torch.dtype, size: int | None
) -> str | None:
    """Why the rule does not give ``op`` to ``backend``; None where it does.

    devices: the GPUs that the tensors may be on.
    size: None where it is not known; then it does not matter.
    """
    line = next((x for x in LINES if (x.op, x.backend) == (op, backend)), None)
    if line is None:
        return "deepfast/rule.py does not list it for this op"
    if 8 * dtype.itemsize not in line.bits:
        return f"deepfast/rule.py lists it only for {' and '.join(map(str, line.bits))}-bit dtypes"
    for i in devices:
        if torch.cuda.get_device_capability(i) < line.capability:
            needed = ".".join(map(str, line.capability))
            return f"deepfast/rule.py lists it only for compute capability {needed} or newer"
    if size is not None and size > line.largest:
        return f"deepfast/rule.py lists it only for sizes up to {line.largest}, got {size}"
    return None
