"""More than 2^31 elements, which an int32 does not count: the last tokens, and those around element
2^31, have the bits that they have alone."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from tests.kernels.calls import chosen, without_memory

REAL = torch.cuda.is_available()
# Side by side they would not fit the memory of a GPU, so that one process runs them all.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large"), *[pytest.mark.slow] * (not REAL)]

T, D = (524_800, 4096) if REAL else (96, 16)
ROWS = {"T": T, "D": D}
LOGITS = {"T": 24_576, "V": 100_000} if REAL else {"T": 64, "V": 40}
# Sentences of one length.
LENGTH, HEADS, WIDTH = (64, 8, 64) if REAL else (2, 2, 16)
SENTENCES = 66_000 if REAL else 24
TOKENS = LENGTH * SENTENCES
SENTENCE = {"T": TOKENS, "Q": TOKENS, "N": SENTENCES, "G": HEADS, "H": HEADS, "E": WIDTH}
STATES = ROWS | {"S": 3, "R": 2, "k": 1, "near": [0, 1], "grad_slot": 2}
STATES |= {"pull_rows": [1], "pull_slots": [2]}
# Each slot is smaller, and the last ones are further away than an int32 can count.
SLOTS = 80 if REAL else 6
FAR = {"T": 65_536 if REAL else 32, "D": 512 if REAL else 64, "S": SLOTS + 1, "R": SLOTS}
MIX = {"sources": range(SLOTS - 2), "rows": range(SLOTS - 2, SLOTS)}
PULL = {"sources": range(2), "rows": range(2, SLOTS)}
BARE = {"norm_weight": False, "norm_bias": False}

BOTH_WAYS = [
    ("triton", "layer_norm", {}, ROWS), ("triton", "activation", {"kind": "relu"}, ROWS),
    ("triton", "activation", {"kind": "gelu"}, ROWS), ("triton", "boundary", {}, STATES),
    ("cuda", "boundary", {}, STATES), ("triton", "attention", {"length": LENGTH}, SENTENCE),
]  # fmt: skip
CALLS = [
    *(
        (by, f"{op}_{way}", *given)
        for by, op, *given in BOTH_WAYS
        for way in ("forward", "backward")
    ),
    ("triton", "cross_entropy", {}, LOGITS),
    *(("triton", "mix_rows", MIX | norm, FAR) for norm in ({}, BARE)),
    *(("triton", "pull_rows", PULL | norm, FAR) for norm in ({}, BARE)),
]
"""A backend and a launch, its choices of `tests.kernels.calls`, and its sizes and lists."""


def random(o, x, device):
    """A tensor on the device like that without memory."""
    if o.dtype == "int32":
        return LENGTH * torch.arange(len(x), dtype=x.dtype, device=device)
    if o.dtype == "int64":
        return torch.randint(LOGITS["V"], x.shape, device=device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).normal_()


def part(o, x, rows):
    """The operand of a call with these rows alone."""
    if o.dtype == "int32":
        return x[: (rows.stop - rows.start) // LENGTH + 1]
    axis = next((i for i, size in enumerate(o.shapes[0]) if size in ("T", "Q")), None)
    return x if axis is None else x[(slice(None),) * axis + (rows,)]


@pytest.mark.parametrize(("by", "name", "choices", "sizes"), CALLS, indirect=["by"])
def test_rows_have_the_bits_that_they_have_alone(by, device, name, choices, sizes):
    launch = LAUNCHES[name]
    v = chosen(launch, dtype=torch.bfloat16, dropout_p=0.0, **choices)
    given = without_memory(launch, v, **sizes)
    tensors = {o.name: x for o, x in zip(launch.operands, given, strict=True) if torch.is_tensor(x)}
    operands = [o for o in launch.operands if o.name in tensors]
    needed = sum(x.nbytes for x in tensors.values()) + 2**31
    if REAL and (free := torch.cuda.mem_get_info()[0]) < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    whole = given._replace(**{o.name: random(o, tensors[o.name], device) for o in operands})
    group = LENGTH if "attention" in name else 1
    count, total = 8 * group, sizes["T"]
    widths = [x[0].numel() for x in tensors.values() if x.dim() and len(x) == total]
    middle = min(2**31 // max(widths, default=1) // group * group, total - 2 * count)
    spans = [slice(start, start + count) for start in (middle - group, total - count)]
    parts = [
        {o.name: part(o, getattr(whole, o.name), rows).clone() for o in operands} for rows in spans
    ]
    run = backend.launchers(launch.op, by)[name]
    run(whole)
    for rows, alone in zip(spans, parts, strict=True):
        run(whole._replace(**alone))
        for o in operands:
            if o.writes and set(o.shapes[0]) & set("TQ"):
                assert torch.equal(part(o, getattr(whole, o.name), rows), alone[o.name]), o.name
