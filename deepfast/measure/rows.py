"""One line of a table: the measurements of one variant."""

import statistics
from dataclasses import asdict, dataclass, field


@dataclass(kw_only=True)
class Row:
    """The measurements of one variant of one case. A number that was not measured is None."""

    variant: str
    what: str = ""
    """The case, if a table has several: the name of a depth, a dtype, an op with its sizes."""
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
    resident_bytes: int | None = None
    """Highest resident memory of the process in that run."""
    note: str | None = None
    """Why a number is missing, or how this row was measured differently from the rest."""
    rounds: int = field(default=0, repr=False)
    """How often it is to be timed."""

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
        step, values = self.median, asdict(self)
        del values["rounds"]
        return values | {
            "median_seconds": step,
            "tokens_per_second": self.tokens / step if step else None,
            "gb_per_second": self.gb_per_second,
        }


def claim(
    what: str, value: float | None, wanted: float, *, at_most: bool = False, **more: object
) -> dict:
    """Prints a number beside its target; returns both as plain values.

    Args:
        value: None if it was not measured.
        at_most: whether a smaller number is better.
        more: further fields of the result.
    """
    met = value is not None and (value <= wanted if at_most else value >= wanted)
    value = None if value is None else round(value, 3)
    target = f"at {'most' if at_most else 'least'} {wanted}"
    print(f"  {'ok  ' if met else 'MISS'} {what}: {value} ({target})", flush=True)
    return {"what": what, "value": value, "target": target, "met": met, **more}
