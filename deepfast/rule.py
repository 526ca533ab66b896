"""The table that chooses the default backend of an op on a GPU.

A backend may be the default of an op where the table lists it: for dtypes of these bits, on GPUs of
`availability.CAPABILITY` or newer, up to the largest size. The size of a call is the number of
channels of a row; for attention it is the longest sentence. `backend.BACKENDS` has the order. Where
the table lists none, attention uses torch's sdpa, and the other ops use the reference.
`availability.why_unable` says what a backend cannot run at all.

The boundary in CUDA C++ comes before Triton's: its machine code loads the next rows while it
computes, and waits less for memory. That needs the rows' coefficients in shared memory
(`csrc/cuda/boundary.h`): they fit up to 2,048 channels, and half of that where a thread block has
less than 160 KiB. Its far passes are Triton's in both. In attention Triton's
kernels read packed sentences, and sdpa pads them. Padding costs most where sentences are short. In
fp32 Triton's matmuls use no tensor cores, so sdpa is used. varlen has no dropout, so it is used
only on request. We have not measured these numbers on our own GPU yet: `deepfast selfcheck` prints
the times of all backends on yours. The kernels take any number of tokens, sources and rows, so
these counts do not change the choice. A kernel of Triton that holds whole rows has at most 512
threads for a row, and each of them has registers for 32 channels: together 16384.
"""

from typing import NamedTuple

import torch

from deepfast.availability import CAPABILITY, small_blocks


class Limits(NamedTuple):
    bits: tuple[int, ...]
    largest: float


ALL, HALF, ANY = (16, 32), (16,), float("inf")

TABLE = {
    ("layer_norm", "triton"): Limits(ALL, 16384),
    ("activation", "triton"): Limits(ALL, ANY),
    ("depth_mix", "triton"): Limits(ALL, 16384),
    ("depth_attention", "triton"): Limits(ALL, 16384),
    ("boundary", "cuda"): Limits(ALL, 2048),
    ("boundary", "triton"): Limits(ALL, 16384),
    ("attention_boundary", "triton"): Limits(ALL, 16384),
    ("linear_cross_entropy", "triton"): Limits(ALL, ANY),
    ("peephole_lstm", "triton"): Limits(ALL, ANY),
    ("attention", "triton"): Limits(HALF, 512),
}

LENGTHS = tuple(int(limits.largest) for (op, _), limits in TABLE.items() if op == "attention")
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
    limits = TABLE.get((op, backend))
    if limits is None:
        return "deepfast/rule.py does not list it for this op"
    if 8 * dtype.itemsize not in limits.bits:
        bits = " and ".join(map(str, limits.bits))
        return f"deepfast/rule.py lists it only for {bits}-bit dtypes"
    if any(torch.cuda.get_device_capability(i) < CAPABILITY for i in devices):
        needed = ".".join(map(str, CAPABILITY))
        return f"deepfast/rule.py lists it only for compute capability {needed} or newer"
    if size is None:
        return None
    largest = limits.largest
    if backend == "cuda" and size > largest / 2 and small_blocks(devices):
        largest /= 2
    if size > largest:
        return f"deepfast/rule.py lists it only for sizes up to {largest:g}, got {size}"
    return None
