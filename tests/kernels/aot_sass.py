"""What the machine code of a kernel contains, what it must not contain, and the table of it."""

import re
from collections import Counter
from dataclasses import dataclass

# ---- reading -----------------------------------------------------------------------------------

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
GROUPS = {
    "loads": {"LDG", "LD"},
    "async": {"LDGSTS", "UTMALDG", "UBLKCP"},
    "stores": {"STG", "ST", "UTMASTG"},
}
"""Accesses to global memory: to registers, straight to shared memory, back."""
SPILLS = {"LDL", "STL"}
ATOMICS = {"ATOM", "ATOMG", "RED", "REDG", "UTMAREDG"}
TENSOR_CORE = {"HMMA", "HGMMA", "UTCHMMA"}
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


def width(opcode: str) -> int:
    """Bits that a thread moves; a bulk copy counts as wide."""
    first, *suffixes = opcode.split(".")
    if first.startswith("U"):
        return 128
    return max((BITS[s] for s in suffixes if s in BITS), default=32)


def read_sass(sass: str) -> dict:
    """Counts of instructions; of accesses to global memory a counter by bits."""
    found = {name: Counter() for name in GROUPS}
    found |= {"spills": 0, "atomics": 0, "tensor core": 0}
    for opcode, n in Counter(LINE.findall(sass)).items():
        first = opcode.split(".")[0]
        for name, group in GROUPS.items():
            if first in group:
                found[name][width(opcode)] += n
        found["spills"] += n * (first in SPILLS)
        found["atomics"] += n * (first in ATOMICS)
        found["tensor core"] += n * (first in TENSOR_CORE)
    return found


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The limits on a multiprocessor's warps; all of these have 65536 registers and 64 warps."""

    multiprocessors: int
    shared: int
    """Bytes of shared memory; each program takes 1 KiB beside its own."""


CHIPS = {
    80: Chip(multiprocessors=108, shared=164 << 10),
    90: Chip(multiprocessors=132, shared=228 << 10),
    100: Chip(multiprocessors=148, shared=228 << 10),
}


def resident_warps(chip: Chip, registers: int, shared: int, warps: int) -> int:
    """Warps of one kernel that a multiprocessor holds at once; 0 if not even one program fits.

    A warp takes registers in units of 256, from the quarter of the file that it lives in.
    """
    of_a_warp = -(-registers * 32 // 256) * 256
    programs = min(4 * (16384 // of_a_warp) // warps, 64 // warps, 32)
    return warps * min(programs, chip.shared // (shared + 1024))


# ---- limits ------------------------------------------------------------------------------------

# The share of bytes that must move 16 bytes at a time, as the machine code counts them: a scalar
# that one thread stores counts like a row that all of them store.
LEAST_WIDE = 0.5
FEWER_WIDE = {
    # Streams no (T, D) operand: adds up a few partial sums.
    "sum_partials_kernel": 0.0,
    # Stores one number for each row.
    "depth_attention_delta_kernel": 0.0,
    # Reads numbers of one state, which lie between those of the others.
    "attend_query_kernel": 0.25,
}

# Kernels of (T, T) products.
PRODUCTS = ("attention_fwd", "attention_bwd")

# What an older compiler spills, in accesses, by Triton's version, the kernel and the target. It is
# known, not wished: a version that is not here may spill nothing.
SPILLED = {
    ("3.6.0", "attention_bwd_kernel", 80): 28,
    ("3.6.0", "attention_boundary_fwd_kernel", 80): 4,
    ("3.6.0", "attention_boundary_bwd_kernel", 80): 30,
    ("3.6.0", "attend_pull_dot_kernel", 80): 8,
    ("3.6.0", "attend_pull_dot_kernel", 90): 21,
    ("3.6.0", "attend_pull_dot_kernel", 100): 18,
    ("3.6.0", "attend_rows_dot_kernel", 80): 6,
    ("3.6.0", "attend_rows_dot_kernel", 100): 4,
    ("3.6.0", "attend_query_kernel", 80): 3,
    ("3.6.0", "attend_query_kernel", 100): 9,
    ("3.6.0", "boundary_bwd_kernel", 80): 15,
    ("3.6.0", "boundary_bwd_kernel", 90): 6,
    ("3.6.0", "boundary_bwd_kernel", 100): 10,
}

# What a change may add to the committed numbers without an error.
MORE_REGISTERS, MORE_SHARED = 8, 1024


def wide_share(accesses: Counter) -> float:
    """The share of all bytes that moves 16 bytes at a time or more; 1 if nothing moves."""
    moved = accesses.total() and sum(bits * n for bits, n in accesses.items())
    return sum(bits * n for bits, n in accesses.items() if bits >= 128) / moved if moved else 1.0


def faults(kernel: dict, committed: dict | None, version: str) -> list[str]:
    """The faults of a kernel, one line each; ``committed`` is its row of the table, ``version``
    that of the Triton that compiled it."""
    lines = []

    def limit(what, held, expected, got):
        if not held:
            where = f"{kernel['kernel']} on sm_{kernel['sm']} in {kernel['case']}"
            lines.append(f"{where}: {what}: expected {expected}, got {got}")

    name = kernel["kernel"].split()[0]
    most = SPILLED.get((version, name, kernel["sm"]), 0)
    limit("LDL and STL", kernel["spills"] <= most, most and f"at most {most}", kernel["spills"])
    limit("atomics", kernel["atomics"] == 0, 0, kernel["atomics"])
    limit("shared memory", kernel["resident"] > 0, "what the chip has", kernel["shared"])
    loads, stores = kernel["loads"] + kernel["async"], kernel["stores"]
    least = FEWER_WIDE.get(name, LEAST_WIDE)
    for what, accesses in {"loads": loads, "stores": stores}.items():
        share = wide_share(accesses)
        got = f"{share:.0%} ({widths(accesses)})"
        limit(f"bytes in 16-byte {what}", share >= least, f"at least {least:.0%}", got)
    if kernel["kernel"].startswith(PRODUCTS) and "float32" not in kernel["case"]:
        some = kernel["tensor core"]
        limit("matrix instructions", some > 0, "some", some)
    if committed:
        for what, more in {"registers": MORE_REGISTERS, "shared": MORE_SHARED}.items():
            most = int(committed[what]) + more
            limit(what, kernel[what] <= most, f"at most {most}", kernel[what])
    return lines


# ---- the table ---------------------------------------------------------------------------------

COLUMNS = (
    "case", "kernel", "sm", "registers", "shared", "warps", "resident", "loads", "async", "stores",
    "tensor core", "spills",
)  # fmt: skip


def widths(accesses: Counter) -> str:
    return " ".join(f"{n}x{bits}" for bits, n in sorted(accesses.items(), reverse=True)) or "-"


def row(kernel: dict) -> list[str]:
    """A kernel's cells, by COLUMNS."""
    cells = [kernel[name] for name in COLUMNS]
    return [widths(cell) if isinstance(cell, Counter) else str(cell) for cell in cells]


def key(kernel: dict) -> tuple[str, str, str]:
    return kernel["case"], kernel["kernel"], str(kernel["sm"])


def write_table(kernels: list[dict]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(row, kernels)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_table(text: str) -> dict[tuple[str, str, str], dict]:
    """Rows of `write_table` by `key`."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines[2:]]
    return {key(r): r for r in rows}
