"""Every launch against the reference in float64, by Triton's interpreter, by CUDA's emulator and by
the CPU's library. Attention has a file of its own."""

import pytest
import torch

from deepfast.launches import LAUNCHES
from tests.kernels.agreement import agree, apart, plain, served
from tests.kernels.calls import chosen, covering, given_by

BF16, FP16 = torch.bfloat16, torch.float16
BOUNDARIES = ("boundary", "attention_boundary")
SIZES = {"R": (24,), "S": (25,), "H": (1, 3), "V": (17, 512, 1001), "P": (1, 3), "N": (1, 5, 33)}
FEW = SIZES | {"T": (3,), "D": (17, 64, 100), "K": (3, 17)}
MORE = SIZES | {"T": (5, 18), "D": (17, 64, 100, 768), "K": (3, 17)}


NAMES = [name for name, launch in LAUNCHES.items() if launch.op != "attention"]
# Triton's interpreter is slow. Of its options each value runs in the fast tests, each pair in the
# slow ones.
CALLS = [
    pytest.param(by, name, together, sizes, marks=[pytest.mark.slow] * slow, id=f"{name}-{by}")
    for by, together, sizes, slow in (
        ("triton", 1, FEW, False), ("triton", 2, FEW, True),
        ("cuda", 2, MORE, False), ("cpu", 2, MORE, False),
    )
    for name in NAMES
    if served(by, name)
]  # fmt: skip


@pytest.mark.parametrize(("kernels", "name", "together", "sizes"), CALLS, indirect=["kernels"])
def test_agrees(poison, kernels, name, together, sizes):
    """With the options of `calls.choices`, with rows apart, and with gradients in the slots of the
    states or apart from them; and to the bit with another run."""
    for number, v in enumerate(covering(LAUNCHES[name], together, sizes)):
        given = given_by(LAUNCHES[name], v) | {"rank": v.get("rank", 0), "again": number == 0}
        if "grads" in LAUNCHES[name].names and number % 2:
            given["grads"] = "states"
        try:
            agree(kernels, name, v["dtype"], apart if number % 3 == 0 else plain, **given)
        except AssertionError as error:
            error.add_note(f"{name} with {v}")
            raise


def both(op, *calls):
    return [(f"{op}_{way}", call) for way in ("forward", "backward") for call in calls]


def patterns(*lists):
    """Dilation, periods, blocks, any order, and rows that do not read their own state."""
    calls = [{"near": near, "pull_rows": pulls, "T": 3, "D": 33} for near, pulls in lists]
    return [call for op in BOUNDARIES for call in both(op, *calls)]


def far(names, *lists):
    """Sources and rows of any kind."""
    calls = [{"sources": sources, "rows": rows, "T": 3, "D": 24} for sources, rows in lists]
    return [(name, call | {"accumulate": True}) for name in names for call in calls]


def of_tiles(dim, kind):
    """More states or rows than a tile of 16, rows in one turn, in two and too wide for tensor
    cores, more tokens than programs."""
    call = {"kind": kind, "T": 9, "D": dim, "dtype": BF16}
    yield "attend_rows", call | {"sources": range(19), "rows": range(19, 21)}
    yield "attend_pull", call | {"sources": range(2), "rows": range(2, 21)}


WANTED = "dx", "dresidual", "dweight", "dbias"
OTHERS = [
    *((name, {"T": 0, "D": 64, "V": 64}) for name in NAMES),
    *((name, {"T": 1, "D": 1, "V": 1}) for name in NAMES if name != "attend_pull"),
    *((name, {"T": 2, "D": 255, "V": 255, "dtype": BF16}) for name in NAMES),
    *(("layer_norm_backward", {"T": 5, "D": 33} | {w: w == one for w in WANTED}) for one in WANTED),
    *patterns(((12,), (12,)), ((8, 10, 12), (12, 14, 16)), ((8, 9, 10, 11, 12), (12, 13))),
    *far(("mix_rows", "attend_rows"), (range(13), range(13, 18)), (range(4), range(4, 20))),
    *far(("mix_rows", "attend_rows"), (range(1, 18, 4), [18, 20]), ([0, 1, 2, 5, 9], [10, 14])),
    *far(("mix_rows",), ([], [3, 4])),
    *far(("pull_rows", "attend_pull"), (range(9), range(9, 21)), (range(16), range(16, 20))),
    *far(("pull_rows", "attend_pull"), ([0, 3, 6], range(8, 20, 2)), ([2, 1, 0], [9, 8, 7])),
    *both("depth_attention", *({"K": n, "H": h, "T": 5, "D": 40} for n, h in ((1, 1), (33, 2)))),
    *(("cross_entropy", {"T": t, "V": v}) for t, v in ((2, 4096), (2, 8195), (1, 70_001))),
    *both("peephole_lstm", *({"P": p, "N": n, "H": h} for p, n, h in ((1, 1, 1), (2, 2, 70)))),
    *both("peephole_lstm", *({"P": p, "N": n, "H": 8} for p, n in ((0, 3), (2, 0)))),
    *both("depth_mix", {"K": 1, "T": 3, "D": 20}),
    *of_tiles(64, "softmax"),
    *of_tiles(64, "relu"),
]
"""Launches at sizes and with lists of their own."""
WIDE_ROW = {"near": (12,), "pull_rows": (12,), "T": 2, "D": 8192, "dtype": BF16}
LARGE = [
    # More tiles than programs: the sums over tokens continue from tile to tile.
    *((f"{op}_backward", {"T": 70, "D": 512}) for op in ("layer_norm", *BOUNDARIES)),
    *both("activation", {"T": 2, "D": 8200, "kind": "gelu"}, {"T": 300, "D": 24, "dtype": FP16}),
    # Its table fits a block, but a row takes more threads than registers leave room for.
    *both("boundary", WIDE_ROW),
    *of_tiles(200, "softmax"),
    *of_tiles(1000, "relu"),
    *of_tiles(1030, "softmax"),
    *of_tiles(1030, "relu"),
    # More sources than the arguments of one launch.
    *both("depth_mix", {"K": 121, "T": 3, "D": 20, "dtype": BF16}),
]
"""The same, slow in Triton's interpreter."""
AT = [
    pytest.param(by, name, call, marks=[pytest.mark.slow] * (slow and by == "triton"))
    for by in ("triton", "cuda")
    for calls, slow in ((OTHERS, False), (LARGE, True))
    for name, call in calls
    if served(by, name)
]


@pytest.mark.parametrize(("kernels", "name", "call"), AT, indirect=["kernels"], ids=str)
def test_agrees_at(poison, kernels, name, call):
    sizes = {"H": 1, "E": 8, "G": 1, "K": 3, "P": 2, "N": 3} | call
    v = chosen(LAUNCHES[name], **{"dtype": torch.float32} | sizes)
    agree(kernels, name, v["dtype"], **given_by(LAUNCHES[name], v))
