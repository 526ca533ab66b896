"""The machine that a benchmark ran on."""

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """The processor's name."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
