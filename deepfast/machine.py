"""The machine of a report: what it is, and how much memory is free or used."""

import contextlib
import ctypes
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from deepfast import backend
from deepfast.version import __version__


def cpu_model() -> str:
    """The processor's name."""
    name = None
    with contextlib.suppress(OSError):
        name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return name.group(1).strip() if name else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of a source checkout, with ``+`` if files differ from it; None elsewhere."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    # Tags are not wanted: the name of a commit is its hash alone.
    what = "describe --always --exclude=* --abbrev=12 --dirty=+"
    command = ["git", "-C", str(root), *what.split()]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def environment() -> dict:
    """The facts that a reader needs to judge the numbers or to reproduce them."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepfast": __version__,
        "commit": git_commit(),
        "build": {k: v for k, v in backend.build_info().items() if v is not None},
        "backends": {op: backend.chosen(op, None, "cpu", torch.float32) for op in backend.OPS},
    }


def free_bytes() -> int:
    """Memory that a step may use now without making the machine swap."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(available.group(1)) * 1024 if available else free
        # A container may have a lower limit than the machine.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass
    return free


class ResidentPeak:
    """The process's highest resident memory inside a block, if the system reports it (Linux).

    It includes everything: code, libraries, parameters, freed memory that was not returned.
    """

    nbytes: int | None = None

    def __enter__(self) -> "ResidentPeak":
        try:
            # Freed memory that the allocator keeps would hide what the block uses.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._known = True
        except (OSError, AttributeError):
            self._known = False
        return self

    def __exit__(self, *error: object) -> None:
        if self._known:
            peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
            self.nbytes = int(peak.group(1)) * 1024 if peak else None
