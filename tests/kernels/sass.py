"""Instructions that the machine code of a Triton kernel must not contain."""

import re

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""By target the bytes of shared memory that a program may have."""

OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
SPILLS = {"LDL", "STL"}
ATOMICS = {"ATOM", "ATOMG", "RED", "REDG", "UTMAREDG"}

# What Triton 3.6 spills, in accesses for the targets 80, 90 and 100. It is known, not wished: a
# newer version may spill nothing.
SPILLED = {
    "attention_bwd_kernel": (28, 0, 0),
    "attention_boundary_bwd_kernel": (19, 23, 23),
    "attend_pull_dot_kernel": (26, 20, 26),
    "attend_rows_dot_kernel": (12, 8, 10),
    "attend_query_kernel": (3, 0, 9),
    "boundary_bwd_kernel": (0, 3, 7),
}


def faults(name: str, target: int, listing: str, shared: int, version: str) -> list[str]:
    """A line for each fault of a kernel, given its listing and its bytes of shared memory: spills,
    atomics, which add in any order, and more shared memory than there is.

    version: of the Triton that compiled it.
    """
    code = OPCODE.findall(listing)
    known = SPILLED.get(name, (0, 0, 0)) if version.startswith("3.6.") else (0, 0, 0)
    found = {
        "LDL and STL": (sum(op in SPILLS for op in code), known[list(SHARED).index(target)]),
        "atomics": (sum(op in ATOMICS for op in code), 0),
        "shared memory": (shared, SHARED[target]),
    }
    too_much = {what: counts for what, counts in found.items() if counts[0] > counts[1]}
    return [f"{what}: expected at most {most}, got {n}" for what, (n, most) in too_much.items()]
