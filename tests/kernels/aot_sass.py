"""Instructions that the machine code of a Triton kernel must not contain."""

import re

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""By target the bytes of shared memory that a program may have."""

OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
SPILLS = {"LDL", "STL"}
ATOMICS = {"ATOM", "ATOMG", "RED", "REDG", "UTMAREDG"}

# What an older compiler spills, in accesses, by Triton's version, the kernel and the target. It is
# known, not wished: a version that is not here may spill nothing.
SPILLED = {
    ("3.6.0", "attention_bwd_kernel", 80): 28,
    ("3.6.0", "attention_boundary_bwd_kernel", 80): 19,
    ("3.6.0", "attention_boundary_bwd_kernel", 90): 23,
    ("3.6.0", "attention_boundary_bwd_kernel", 100): 23,
    ("3.6.0", "attend_pull_dot_kernel", 80): 26,
    ("3.6.0", "attend_pull_dot_kernel", 90): 20,
    ("3.6.0", "attend_pull_dot_kernel", 100): 26,
    ("3.6.0", "attend_rows_dot_kernel", 80): 12,
    ("3.6.0", "attend_rows_dot_kernel", 90): 8,
    ("3.6.0", "attend_rows_dot_kernel", 100): 10,
    ("3.6.0", "attend_query_kernel", 80): 3,
    ("3.6.0", "attend_query_kernel", 100): 9,
    ("3.6.0", "boundary_bwd_kernel", 90): 3,
    ("3.6.0", "boundary_bwd_kernel", 100): 7,
}


def faults(name: str, target: int, code: list[str], shared: int, version: str) -> list[str]:
    """A line for each fault of a kernel, given its opcodes and its bytes of shared memory: spills,
    atomics, which add in any order, and more shared memory than there is.

    version: of the Triton that compiled it.
    """
    found = {
        "LDL and STL": (sum(op in SPILLS for op in code), SPILLED.get((version, name, target), 0)),
        "atomics": (sum(op in ATOMICS for op in code), 0),
        "shared memory": (shared, SHARED[target]),
    }
    too_much = {what: counts for what, counts in found.items() if counts[0] > counts[1]}
    return [f"{what}: expected at most {most}, got {n}" for what, (n, most) in too_much.items()]
