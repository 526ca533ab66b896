"""Measured numbers: a row of `bench/results/results.csv` for each.

The file is of one machine. Another machine, or the same one with other instructions, has a file of
its own beside it, `results-NAME.csv`.
"""

import csv
import datetime
import io
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from deepfast.backend import build_info
from deepfast.files import write_atomically
from deepfast.machine import cpu_model, git_commit

FOLDER = Path(__file__).parent / "results"
commit = cache(git_commit)
"""Asked before the first row makes the checkout differ from it."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number, how it was measured, and where."""

    command: str
    case: str
    variant: str
    depth: int
    """Layers; 0 where there are none."""
    unit: str
    value: float
    """The median of the rounds."""
    low: float
    """The lowest and the highest of the rounds."""
    high: float
    sizes: str
    processor: str
    threads: int
    load: float
    """The load average."""
    date: str
    commit: str

    @property
    def key(self) -> tuple:
        """The same for the same number on all machines."""
        return self.command, self.case, self.variant, self.depth, self.unit

    def differs(self, other: "Result") -> bool:
        """Whether two numbers differ as they are shown, and by more than the noise of their
        rounds."""
        apart = self.low > other.high or other.low > self.high
        return apart and str(self) != str(other)

    def __str__(self) -> str:
        return f"{self.value:.2f}" if self.value < 10 else f"{self.value:.3g}"


def result(values: Sequence[float], unit: str, sizes: str, command: str, case: str, variant: str,
           depth: int | None = None) -> Result:  # fmt: skip
    """A number measured on this machine; its values, one for each round."""
    value, low, high = (float(f"{f(values):.4g}") for f in (statistics.median, min, max))
    return Result(
        command=command, case=case, variant=variant, depth=depth or 0, unit=unit, value=value,
        low=low, high=high, sizes=sizes,
        processor=f"{cpu_model()}, {str(build_info().get('cpu')).upper()}",
        threads=torch.get_num_threads(), load=round(os.getloadavg()[0], 1),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), commit=commit() or "",
    )  # fmt: skip


def path_of(folder: Path = FOLDER, name: str | None = None) -> Path:
    """The file of the main machine, or of another one by its name."""
    return folder / ("results.csv" if name is None else f"results-{name}.csv")


def read(path: Path) -> dict[tuple, Result]:
    """Every row by its key, in the order of the file; none where there is no file."""
    if not path.exists():
        return {}
    kinds = {field.name: field.type for field in fields(Result)}
    with path.open(newline="") as file:
        rows = [Result(**{k: kinds[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]  # type: ignore[operator]
    return {row.key: row for row in rows}


def write(rows: Iterable[Result], path: Path) -> None:
    write_csv([asdict(row) for row in rows], path)


def write_csv(rows: Sequence[dict], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
