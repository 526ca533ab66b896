"""One line of a table of measurements, measured or not."""

import statistics
from dataclasses import asdict, dataclass, field

MEASURED, DOES_NOT_FIT, NOT_MEASURED = "measured", "does not fit", "not measured"


def refusal(needed: float | None, left: float) -> str:
    """Why a run is not started: seconds it needs and seconds that were left."""
    needs = "" if needed is None else f"needs about {needed:.2g} s, "
    return f"{needs}{max(left, 0):.2g} s of the time budget were left"


@dataclass(kw_only=True)
class Row:
    """A variant at a depth. Fields that were not measured are None."""

    variant: str
    depth: int
    status: str = MEASURED
    """One of MEASURED, DOES_NOT_FIT, NOT_MEASURED."""
    note: str | None = None
    """Why a number is missing, or how it was got where that differs from the rest."""
    seconds: list[float] = field(default_factory=list)
    """Forward and backward, the timed rounds."""
    first_seconds: float | None = None
    """The first run, with memory counted and nothing warm."""
    adam_seconds: float | None = None
    """One step of fused Adam over the parameters, the same for all variants of a depth."""
    tokens: int = 0
    """Of a step."""
    peak_bytes: int | None = None
    """Highest bytes of live tensors beyond parameters and input; gradients included."""
    predicted_peak_bytes: int | None = None
    """From the formula, before the run, where a run had to be allowed first."""
    resident_bytes: int | None = None
    """Highest resident memory of the process in that run."""
    traffic_bytes: int | None = None
    """States read and written by the connection in a step, from its schedule."""
    loss: float | None = None

    @property
    def median(self) -> float | None:
        """Seconds of a step: the median of the timed rounds, or the first run."""
        return statistics.median(self.seconds) if self.seconds else self.first_seconds

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        step = self.median
        return asdict(self) | {
            "median_seconds": step,
            "tokens_per_second": self.tokens / step if step else None,
            "training_step_seconds": step + self.adam_seconds
            if step is not None and self.adam_seconds is not None
            else None,
        }
