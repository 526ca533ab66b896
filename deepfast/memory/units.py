"""Converts text such as "24GiB" to a number of bytes and back."""

import math
import re

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)},
}
_NAMES = {name.lower(): factor for name, factor in UNITS.items()}


def parse_bytes(text: str | int | float, name: str = "budget") -> int:
    """A number of bytes; text may end in KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB
    (powers of 1000), in letters of either case, with or without a space. ``name`` is what errors
    call it.

    Raises:
        ValueError: for anything else, and for a size below 1 byte.
    """
    expected = f"{name}: expected bytes such as 24GiB, 80GB or a number"
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"{expected}, got {text!r}")
    if isinstance(text, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
        if found is None or found[2] not in _NAMES:
            raise ValueError(f"{expected}, got {text!r}")
        size = float(found[1]) * _NAMES[found[2]]
    else:
        size = text
    # NaN fails both comparisons.
    if not 1 <= size < 2**63:
        raise ValueError(f"{expected} of at least 1, got {text!r}")
    return int(size)


def format_bytes(size: float, *, up: bool = False) -> str:
    """At least three digits with a unit: "24.0 GiB", "512 B". ``up`` rounds up."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        # A size that would round to 1024 of a unit is shown as 1.00 of the next.
        if abs(size) >= 2 ** (10 * power) * 0.9995:
            value = size / 2 ** (10 * power)
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            value = math.ceil(value * 10**digits) / 10**digits if up else value
            return f"{value:.{digits}f} {unit}"
    return f"{size:.0f} B"
