"""The results: one row of `bench/results/results.csv` for each number and processor.

Pages name the key of a number beside it, and `tests/test_results.py` compares the two.
"""

import csv
import datetime
import io
import os
import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from deepfast.backend import build_info
from deepfast.files import write_atomically
from deepfast.machine import cpu_model, git_commit

commit = cache(git_commit)
"""Asked before the first row makes the checkout differ from it."""
FILE = Path(__file__).parent / "results" / "results.csv"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number, how it was measured, and where."""

    key: str
    processor: str
    """Its architecture; "any" if the number does not depend on it, such as counted bytes."""
    value: float
    spread: str = ""
    """Behind the value: "to 1.3", the other end over several runs, or a standard deviation."""
    unit: str
    what: str
    threads: str = ""
    load: str = ""
    """The load average at the start, or what else ran."""
    date: str
    commit: str
    command: str


def read(path: Path = FILE) -> dict[tuple[str, str], Result]:
    """Every row by key and processor."""
    with path.open(newline="") as file:
        rows = [Result(**row | {"value": float(row["value"])}) for row in csv.DictReader(file)]
    return {(row.key, row.processor): row for row in rows}


def record(
    key: str, value: float, unit: str, what: str, command: str, where: str | None = None,
    spread: str = "",
) -> None:  # fmt: skip
    """Prints a number and writes it to the file, over an older one.

    where: "any" if it is the same on every machine; else it is of this processor.
    spread: see `Result`.
    """
    value = float(f"{value:.4g}")
    row = Result(
        key=key, processor=where or processor(), value=value, unit=unit, what=what, command=command,
        spread=spread,
        threads=str(torch.get_num_threads()), load=f"{os.getloadavg()[0]:.1f}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), commit=commit() or "",
    )  # fmt: skip
    print(f"{value:>10g} {f'{spread} {unit}'.strip():<6} {key}: {what}", flush=True)
    write(read() | {(key, row.processor): row})


def write(rows: dict[tuple[str, str], Result], path: Path = FILE) -> None:
    """The file of these rows, sorted."""
    text = io.StringIO()
    names = [field.name for field in fields(Result)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for _, row in sorted(rows.items()):
        writer.writerow(asdict(row) | {"value": f"{row.value:g}"})
    write_atomically(path, text.getvalue().encode())


def processor() -> str:
    """The processor's architecture, and the instruction set if it is not the strongest one."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return cpu_model()
    family = re.search(r"cpu family\s*: (\d+)", info)
    names = {
        "25": "AMD Zen 4" if "avx512f" in info else "AMD Zen 3",
        "26": "AMD Zen 5",
        "6": "Intel, AMX" if "amx_tile" in info else "Intel Xeon",
    }
    name = names.get(family[1] if family else "", cpu_model())
    forced = os.environ.get("DEEPFAST_CPU_CAPABILITY")
    return f"{name} by {str(build_info()['cpu']).upper()}" if forced else name
