"""Reads machine code as cuobjdump prints it: instructions, loops, and what is seldom reached."""

import re
from dataclasses import dataclass

LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);[^\n]*\n"
    r"\s+/\* 0x([0-9a-f]{16}) \*/",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    operands: str
    control: int
    """From bit 0: 4 bits of stall, a yield bit, 3 bits each for the results written and the
    operands read, 6 bits of a wait mask. As in the machine code since Volta, from bit 41 of the
    second word on."""

    @property
    def first(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if self.first == "BRA" and found else None

    @property
    def unusual(self) -> bool:
        """Whether a row of one warp, of aligned 16-bit values, never gets here."""
        narrow = self.first in ("LDG", "STG") and ".U16" in self.opcode
        return narrow or self.first in ("BAR", "CALL")


def instructions(listing: str) -> list[Instruction]:
    """Those of one function, as cuobjdump prints it."""
    return [
        Instruction(int(m[1], 16), m[2], m[3], int(m[4], 16) >> 41) for m in LINE.finditer(listing)
    ]


def jumps(code: list[Instruction], first: int, last: int) -> list[tuple[int, int]]:
    """The branches that jump over the instructions from ``first`` to ``last``, smallest first."""
    around = [(i.address, i.target) for i in code if i.target is not None]
    around = [(a, b) for a, b in around if a < first and last < b]
    return sorted(around, key=lambda jump: jump[1] - jump[0])


def usual(code: list[Instruction], never: str) -> list[Instruction]:
    """Without the smallest stretch around each unusual instruction that a branch jumps over."""
    odd = [i.address for i in code if i.unusual or i.opcode.startswith(never)]
    found = [jumps(code, at, at) for at in odd]
    return [i for i in code if not any(s and s[0][0] < i.address < s[0][1] for s in found)]


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """First and last address of every loop. What lies behind the last exit are waits for barriers
    that are not over at once, and slow paths: they jump back, but not to the begin of a loop."""
    found: dict[int, int] = {}
    end = max((i.address for i in code if i.first == "EXIT"), default=code[-1].address)
    for i in code:
        if i.target is not None and i.target <= i.address <= end:
            found[i.target] = max(found.get(i.target, 0), i.address)
    return sorted(found.items())


def copies(code: list[Instruction]) -> set[tuple[int, int]]:
    """The stretches with bulk copies, from behind a branch to before its target. A branch jumps
    over each where no step is left to be copied, and inside that one another where it is not this
    warp's turn. Branches out of the loop go to waits."""
    found, end = set(), code[-1].address
    for at in (i.address for i in code if i.first == "UBLKCP"):
        reads = [i.address for i in code if i.first == "LDSM"]
        around = [(a, b) for a, b in jumps(code, at, at) if b <= end]
        around = [(a, b) for a, b in around if not any(a < r < b for r in reads)]
        target = sorted({b for _, b in around})[-2]
        found.add((min(a for a, b in around if b == target) + 1, target - 1))
    return found
