"""Every launch under compute-sanitizer, and the main ones under ncu."""

import csv
import sys

from bench.gpu.machine import tool
from bench.gpu.workers import Task

LAUNCHES = [sys.executable, "-m", "bench.gpu.launches"]
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
"""Tools and their options. Torch asks a driver for things that it may refuse: no fault of ours."""

ERROR_STATUS = 9

METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of the memory's peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the multiprocessors' peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of the warps",
    "launch__registers_per_thread": "registers",
}
"""What ncu measures, by its names, and what the page calls it."""


def sanitizer_tasks(check: str, dry: bool, processes: int) -> tuple[list[Task], str | None]:
    """Tasks that run every launch under a tool of compute-sanitizer, and why there are none.

    processes: how many share Triton's launches, which compile for long.
    """
    program = tool("compute-sanitizer")
    if program is None and not dry:
        return [], "compute-sanitizer was not found"
    prefix = [program, "--tool", check, *SANITIZERS[check], "--error-exitcode", str(ERROR_STATUS)]
    shares = {"cuda": 1} if dry else {"cuda": 1, "triton": processes}
    # Torch's allocator keeps freed memory, in which a wrong access would not be found.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "DEEPFAST_PROOF": "off"}
    return [
        Task(f"{check} of {by}, {i + 1} of {count}",
             [*([] if dry else prefix), *LAUNCHES, "--by", by, "--share", f"{i}/{count}",
              "--dry-run" if dry else "--thorough"], environment)
        for by, count in shares.items() for i in range(count)
    ], None  # fmt: skip


def ncu_tasks(dry: bool) -> tuple[list[Task], str | None]:
    """Tasks that measure the kernels of every launch, and why there are none."""
    program = tool("ncu")
    if dry or program is None:
        return [], "a dry run has no ncu" if dry else "ncu was not found"
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--nvtx", "--nvtx-include",
               "launch/", "--metrics", ",".join(METRICS)]  # fmt: skip
    return [
        Task(f"ncu of {by}",
             [program, *options, *LAUNCHES, "--by", by, "--size", "8192", "512"],
             {"DEEPFAST_PROOF": "off"})
        for by in ("cuda", "triton")
    ], None  # fmt: skip


def kernels(output: str) -> list[dict]:
    """A row for each kernel that ncu measured: its name and METRICS by the page's names."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = []
    for row in csv.DictReader(lines):
        # The line after the head has the units.
        if row["ID"]:
            found = {said: row.get(metric) for metric, said in METRICS.items()}
            rows.append({"kernel": row["Kernel Name"][:80]} | found)
    return rows
