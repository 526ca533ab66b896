"""`limits.py` on machine code made up for the purpose."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def limits():
    spec = importlib.util.spec_from_file_location("limits", Path(__file__).with_name("limits.py"))
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules["limits"] = module
    spec.loader.exec_module(module)
    return module


def listing(lines):
    """Lines of (opcode and operands, stall, barrier written or 7, wait mask) as cuobjdump's."""
    text = ""
    for i, (what, stall, written, mask) in enumerate(lines):
        control = stall | written << 5 | 7 << 8 | mask << 11
        text += f"        /*{16 * i:04x}*/    {what} ;   /* 0x{0:016x} */\n"
        text += f"                          /* 0x{control << 41:016x} */\n"
    return text


# A loop over tokens from 0x10 to 0x90, with one inner loop and one stretch that no row of one warp
# reaches.
LINES = [
    ("MOV R1, R2", 1, 7, 0),
    ("LDG.E.128 R4, desc[UR4][R2.64]", 1, 0, 0),
    ("FADD R4, R4, R5", 4, 7, 1),
    ("LDS.128 R8, [R1]", 2, 7, 0),
    ("@P0 BRA 0x30", 5, 7, 0),
    ("@!P1 BRA 0x80", 5, 7, 0),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", 5, 7, 0),
    ("FADD R4, R4, R5", 4, 7, 0),
    ("STG.E.128 desc[UR4][R2.64], R4", 1, 7, 0),
    ("@P2 BRA 0x10", 5, 7, 0),
    ("EXIT", 5, 7, 0),
]


def test_counts_a_loop(limits):
    code = limits.instructions(listing(LINES))
    assert [i.first for i in code[:2]] == ["MOV", "LDG"]
    case = limits.Case(
        source="", kernel="", what="", loops=(3,), rows_read=1, rows_written=1, ahead=1, warps=8
    )
    found = limits.count(code, case)
    # Outside the inner loop 5: LDG, FADD, the branch over the barrier, STG, the last branch.
    assert found["slots"] == 5 + 3 * 2
    assert found["shared"] == 3 * 4
    # The sum waits for the load.
    assert found["alone"] == limits.LATENCY + 4 + 3 * (2 + 5) + 5 + 1 + 5


def test_a_loop_that_no_case_names_is_an_error(limits):
    case = limits.Case(
        source="", kernel="k", what="", rows_read=1, rows_written=1, ahead=1, warps=8
    )
    with pytest.raises(SystemExit, match="expected 0 inner loops, got 1"):
        limits.count(limits.instructions(listing(LINES)), case)


# A loop over tokens from 0x00 to 0xd0. Unless a branch jumps over it, one warp waits for a stage
# and copies into it; there, the copies of the first loop exist and those of the second do not. A
# sum is added where a branch says so. Behind the exit is the wait.
COPYING = [
    ("LDSM.16.M88.4 R4, [R1]", 1, 7, 0),
    ("@P0 BRA 0x90", 1, 7, 0),
    ("@P1 BRA 0x80", 1, 7, 0),
    ("@!P2 BRA 0x100", 1, 7, 0),
    ("UBLKCP.S.G [UR4], [UR6], UR5", 1, 7, 0),
    ("BRA.U.ANY 0x40", 1, 7, 0),
    ("@P3 BRA 0x80", 1, 7, 0),
    ("BRA.U.ANY 0x70", 1, 7, 0),
    ("MOV R1, R2", 1, 7, 0),
    ("MOV R1, R2", 1, 7, 0),
    ("@P4 BRA 0xc0", 1, 7, 0),
    ("LDG.E.128 R4, desc[UR4][R2.64]", 1, 7, 0),
    ("STG.E.128 desc[UR4][R2.64], R4", 1, 7, 0),
    ("@P5 BRA 0x0", 1, 7, 0),
    ("EXIT", 1, 7, 0),
    ("NOP", 1, 7, 0),
    ("@!P2 BRA 0x100", 1, 7, 0),
    ("BRA 0x40", 1, 7, 0),
]


def test_counts_copies_of_one_warp(limits):
    case = limits.Case(
        source="", kernel="", what="", tokens=0.5, loops=(4, 0), rows_read=1, rows_written=1,
        ahead=1, warps=8, never="LDG.E.128",
    )  # fmt: skip
    found = limits.count(limits.instructions(listing(COPYING)), case)
    # Of every warp 8: without the copies and the load. An eighth: two branches, four times two.
    assert found["slots"] == 2 * (8 + (2 + 4 * 2) / 8)
