"""Calls of every launch of `deepfast.launches`, which tests make random, or without memory.

A call is a dictionary of choices. Each ``Tensor?`` is given or None, each bool is True or False, a
word is each of its words, and a tensor has each of its ranks. Lists, dtypes and sizes take the
values below.
"""

import itertools
import random
import re
from collections.abc import Iterator

import torch

from deepfast.ops.common import empty_slots

ROWS, K = 24, 12
"""Rows of the depth weights, and the row of a boundary."""

VALUES = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dropout_p": (0.1, 0.0),
    "label_smoothing": (0.1, 0.0),
    "near": (range(8, K + 1), range(8, K), (K,), ()),
    "pull_rows": (range(K, 16), range(K + 1, 16), (K,), ()),
    "sources": (range(8), (0,), (0, 1, 3, 4)),
    "rows": (range(16, ROWS), (16,), (16, 17, 19)),
    "reach": ((-1, -1), (-1, 0), (255, 0), (16, 16)),
    "length": (64, 128, 1024),
}
"""The values of an operand, or of a choice that decides several operands."""

SIZES = {
    "T": (33,), "R": (ROWS,), "S": (ROWS + 1,), "Q": (33,), "N": (3,), "P": (2,),
    "D": (512, 80, 4096), "H": (1, 8), "K": (3, 17), "V": (300, 32000), "E": (64, 32, 128),
    "G": (1, 2),
}  # fmt: skip
"""The sizes behind the letters of the table; the heads of attention are H * G."""


def choices(launch, sizes=SIZES) -> dict[str, tuple]:
    """Everything in which calls of a launch differ, with its values; the first is the default."""
    found = {"dtype": VALUES["dtype"]}
    for o in launch.operands:
        for letter in re.findall("[A-Z]", "".join(map("".join, o.shapes))):
            found |= {letter: sizes[letter]} if letter in sizes else {}
        if o.type == "Tensor?" or (o.type == "Tensor[]" and o.writes):
            found[o.name] = (True, False)
        elif o.type == "bool":
            on = o.name in ("norm", "norm_source", "write_grad")
            found[o.name] = (on, not on)
        elif o.type == "str":
            found[o.name] = o.words
        elif o.name in VALUES and not o.dtype:
            found[o.name] = VALUES[o.name]
        if len(o.shapes) > 1:
            found["rank"] = range(len(o.shapes))
        if o.name == "left":
            found |= {"reach": VALUES["reach"], "length": VALUES["length"]}
    return found


def allowed(launch, v: dict) -> dict:
    """The choices, with those changed that the launcher's callers never make together."""
    name, v = launch.name, dict(v)

    def only(condition, *operands):
        for operand in operands:
            if operand in v:
                v[operand] = v[operand] and bool(condition)

    def exactly(condition, *operands):
        v.update({operand: bool(condition) for operand in operands if operand in v})

    exactly(v.get("dropout_p", 0), "seed")
    if name.startswith("layer_norm"):
        exactly(not v["rms"], "mean")
        exactly(v.get("residual") or v["dropout_p"], "sum")
    elif "boundary" in name:
        output = "out" if name.endswith("forward") else "dout"
        only(v[output], "out_norm_weight", "out_norm_bias", "dout_norm_weight", "dout_norm_bias")
        exactly(v[output], "out_rstd")
        exactly(v[output] and not v["out_rms"], "out_mean")
        exactly(v.get("norm_source"), "source_rstd")
        if not v.get("dout", True):
            v["dx"] = True
    elif name.startswith("depth_mix"):
        exactly(v["norm"], "mean", "rstd")
        only(v["norm"], "norm_weight", "norm_bias", "dnorm_weight", "dnorm_bias")
    elif name.startswith("depth_attention"):
        exactly(not v["query"], "scores")
        only(v["query"], "norm", "dquery")
        only(v["scores"], "dscores")
        # Weights that are given and not scores need no softmax and so no statistics.
        v["most"] = v["most"] or v["query"]
        exactly(v["most"], "lse", "total", "out")
        only(v["most"], "dlse")
    elif name.startswith("peephole"):
        exactly(v.get("c"), "gates")
    if launch.op == "attention_boundary":
        softmax = v["kind"] == "softmax"
        exactly(softmax, "stats", "out_stats")
        exactly(softmax and v.get("partial"), "partial_stats")
        only(v.get("bias") and v.get("dquery"), "dbias")
    return v


def chosen(launch, **v) -> dict:
    """The call with these choices, as far as the launch has them, and the first of each other."""
    axes = choices(launch)
    return allowed(launch, {axis: v.get(axis, values[0]) for axis, values in axes.items()})


def covering(launch, together: int, sizes=SIZES, patience: int = 20) -> Iterator[dict]:
    """Calls in which any ``together`` choices that callers make together occur together.

    Each is the one of 16 drawn at random that has the most new combinations.
    """
    draw, axes = random.Random(launch.name), choices(launch, sizes)
    seen, idle, numbers = set(), 0, {}

    def combinations(v):
        # Tuples of numbers are hashed faster than those of choices.
        chosen = [numbers.setdefault(choice, len(numbers)) for choice in v.items()]
        return set(itertools.combinations(chosen, together))

    while idle < patience:
        drawn = [
            allowed(launch, {axis: draw.choice(values) for axis, values in axes.items()})
            for _ in range(16)
        ]
        combined = [combinations(v) - seen for v in drawn]
        best = max(range(len(drawn)), key=lambda i: len(combined[i]))
        idle = 0 if combined[best] else idle + 1
        if combined[best]:
            seen |= combined[best]
            yield drawn[best]


NUMBERS = {
    **dict.fromkeys(("eps", "source_eps", "out_eps"), 1e-5),
    **dict.fromkeys(("rms", "source_rms", "out_rms", "accumulate", "reverse"), False),
    **dict.fromkeys(("norm", "norm_source", "write_grad"), True),
    **{"dropout_p": 0.3, "kind": "softmax", "label_smoothing": 0.1, "ignore_index": -100},
    **{"k": K, "grad_slot": K + 1, "near": [8, 10, 12], "pull_rows": [13, 14, 15]},
    **{"sources": [0, 1, 2], "rows": [16, 17, 19]},
}
"""What a launch is given besides tensors, where a test does not say it."""


def lists(name: str, given: dict) -> dict:
    """The lists of indices that go with those in ``given``. Each slot 0 stays as it was."""
    known, found = NUMBERS | given, {}
    for rows, slots in (("pull_rows", "pull_slots"), ("rows", "grad_slots")):
        found[slots] = [row + 1 for row in known[rows]]
    written = known["sources" if "pull" in name else "rows"]
    found |= {"out_rows": list(range(1, len(written) + 1)), "B": len(written) + 1}
    return found | given


def given_by(launch, v: dict) -> dict:
    """Of a call the sizes, and the operands that are no tensors or are missing."""
    found = {axis: x for axis, x in v.items() if len(axis) == 1 and axis.isupper()}
    if launch.op == "attention":
        found["H"] *= found["G"]
        found |= dict(zip(("left", "right"), v["reach"], strict=True))
        found |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), v["length"]) | {"scale": 0.125}
    for o in launch.operands:
        if o.type == "Tensor?" and not v[o.name]:
            found[o.name] = None
        elif o.type == "Tensor[]" and not v.get(o.name, True):
            found[o.name] = []
        elif not o.dtype and o.name in v:
            found[o.name] = list(v[o.name]) if o.type == "int[]" else v[o.name]
    return lists(launch.name, found)


def filled(launch, given: dict, rank: int, tensor) -> dict:
    """Every operand: that in ``given``, else of NUMBERS, else what ``tensor(o, shape)`` makes."""
    made = {}
    for o in launch.operands:
        if o.name in given or not o.dtype:
            made[o.name] = given.get(o.name, NUMBERS.get(o.name))
        else:
            shape = o.shape(given, rank if len(o.shapes) > 1 else 0)
            many = o.type == "Tensor[]"
            several = [tensor(o, shape) for _ in range(given["K"] if many else 1)]
            made[o.name] = several if many else several[0]
    return made


def without_memory(launch, v: dict, /, **given):
    """The record of a call whose tensors are on the meta device: a shape, a dtype, strides and an
    aligned address. ``given`` are further sizes and operands."""
    given = given_by(launch, v) | given
    kinds = {"storage": v["dtype"], "compute": torch.float32}
    kinds |= {"int32": torch.int32, "int64": torch.int64}

    def tensor(o, shape):
        meta = {"dtype": kinds[o.dtype], "device": "meta"}
        if not o.dense and o.shapes[0][0] in "SB":
            return empty_slots(shape[0], torch.empty(shape[1:], **meta))
        return torch.empty(shape, **meta)

    return launch.record(**filled(launch, given, v.get("rank", 0), tensor))
