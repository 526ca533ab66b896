"""Rows of measurements. A time alone means little; a ratio between variants of one run is reliable.
The copy bandwidth of the machine is measured in the same run and compared with a kernel's bytes per
second.
"""

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

COPY = "copy"


@dataclass(kw_only=True)
class Row:
    """The measurements of one variant of one case. A number that was not measured is None."""

    variant: str
    what: str = ""
    """The case, if a table has several."""
    depth: int | None = None
    """Layers."""
    tokens: int = 0
    """Tokens of a step."""
    seconds: list[float] = field(default_factory=list)
    """The timed runs."""
    nbytes: int | None = None
    """Bytes that the algorithm has to move."""
    peak_bytes: int | None = None
    """Peak bytes of live tensors that the run made, gradients included."""
    predicted_bytes: int | None = None
    """The same number, from a closed form."""
    counted: bool = True
    """Whether its memory is counted. What counts it keeps `torch.compile` from running its code."""
    note: str | None = None
    """Why a number is missing, or how this row was measured differently from the rest."""

    @property
    def median(self) -> float | None:
        """The median of the seconds of a run."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def gb_per_second(self) -> float | None:
        """1e9 bytes per second, of the bytes that the algorithm has to move."""
        return self.nbytes / self.median / 1e9 if self.nbytes and self.seconds else None

    def as_dict(self) -> dict:
        """The measurements as plain values, for JSON."""
        step = self.median
        return asdict(self) | {
            "median_seconds": step,
            "tokens_per_second": self.tokens / step if step else None,
            "gb_per_second": self.gb_per_second,
        }


def keep_memory() -> bool:
    """Tells glibc to keep freed memory until the process ends; False without glibc.

    By default glibc returns large blocks to the system and faults them in again, page by page. That
    can cost more than the work on them, and chance decides which variant pays for it.
    """
    trim_threshold, mmap_threshold, most = -1, -3, (1 << 31) - 1
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(trim_threshold, most) and libc.mallopt(mmap_threshold, most))


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """How many times faster ``fast`` is, in each round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def copy_variant(
    nbytes: int = 1 << 27, device: torch.device | str = "cpu"
) -> tuple[Callable[[], object], int]:
    """A plain copy, for comparison, and the bytes that it moves (one read and one write)."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * nbytes
