"""Checks of inputs. Each raises one sentence: the argument, what is expected, and the value.

``op`` is the name of the op, module or command at the start of the sentence. This module imports
torch only when it checks a tensor: a command line is checked without it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# For isinstance. Real is for NumPy's numbers. It comes last, because its check is slow.
NUMBER = (float, int, Real)
MOST_THREADS = 1024
"""If torch starts far more threads than the machine allows, the process dies without an error."""
MOST: dict[str | tuple[str, ...], int] = {
    ("layers", "states", "reads", "blocks", "beam", "seeds", "jobs"): 2**16,
    "dim": 2**31 - 1,
    "": 2**63 - 1,
}
"""Suffix of an argument's name -> the largest value of the argument.

Counts have a low limit, because tables grow with them; no model or search comes near it. A wider
``dim`` would make a tensor whose number of elements overflows. All other
arguments must fit into an int64."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 100, 100


def shown(value: object) -> str:
    """A value as a message shows it: long text and many elements are shortened."""
    return _SHORT.repr(value)


def tensor(op: str, name: str, x: object) -> None:
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise TypeError(f"{op}: {name} must be a dense tensor, got a {kind} one")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: {name} must be (..., D) with D >= 1, got {tuple(x.shape)}")


def like(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """``x`` must share shape, dtype and device with ``other``."""
    if x.shape == other.shape and x.dtype == other.dtype and x.device == other.device:
        return
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(x, what), getattr(other, what)
        if got != expected:
            if what == "shape":
                got, expected = tuple(got), tuple(expected)
            raise ValueError(f"{op}: {name} must have {other_name}'s {what} {expected}, got {got}")


def parameter(
    op: str, name: str, p: Tensor | None, shape: tuple, device, *, floating: bool = True
) -> None:
    """``p`` must have this shape and device and, unless it is not ``floating``, a real
    floating-point dtype."""
    if p is None:
        return
    import torch

    if not isinstance(p, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or None, got {type(p).__name__}")
    if p.shape != shape:
        raise ValueError(f"{op}: {name} must be {shape}, got {tuple(p.shape)}")
    if p.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {p.device}")
    if floating and not p.is_floating_point():
        raise ValueError(f"{op}: {name} must have a floating-point dtype, got {p.dtype}")


def is_whole(value: object) -> bool:
    """Whether value is an int, a NumPy integer or a symbolic size of torch, and not a bool."""
    if type(value) is int or type(value).__name__ == "SymInt":
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


def probability(op: str, p: float, *, argument: str = "dropout_p") -> None:
    if not (isinstance(p, NUMBER) and 0.0 <= p <= 1.0):
        raise ValueError(f"{op}: {argument} must be between 0 and 1, got {p!r}")


def eps(op: str, eps: float, *, argument: str = "eps") -> None:
    # Every call of an op runs this check.
    if not (type(eps) is float and 0.0 <= eps < math.inf):
        _numbers(op, {argument: eps}, "a number of at least 0", lambda x: 0.0 <= x < math.inf)


def _each(op: str, values: dict, expected: str, right: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if not right(value):
            raise ValueError(f"{op}: {name} must be {expected}, got {value!r}")


def _numbers(op: str, values: dict, expected: str, right: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        # torch takes only 64-bit integers, and a longer one may overflow a float.
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"{op}: {name} must fit into 64 bits, got {value}")
    _each(op, values, expected, lambda x: isinstance(x, NUMBER) and right(x))


def _span(least: float, most: float | None) -> str:
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def number(op: str, least: float = 0, most: float | None = None, **values: float) -> None:
    """Checks that each keyword argument is a finite number from ``least`` to ``most``."""
    expected, end = f"a number {_span(least, most)}", math.inf if most is None else most
    _numbers(op, values, expected, lambda x: least <= x < math.inf and x <= end)


def finite(op: str, name: str, value: float) -> None:
    _numbers(op, {name: value}, "a finite number", lambda x: -math.inf < x < math.inf)


def positive(op: str, **values: float) -> None:
    """Checks that each keyword argument is a finite number above 0."""
    _numbers(op, values, "a number above 0", lambda x: 0 < x < math.inf)


def fraction(op: str, **values: float) -> None:
    """Checks that each keyword argument is a number in [0, 1)."""
    _numbers(op, values, "a number in [0, 1)", lambda x: 0 <= x < 1)


def whole(op: str, least: int = 1, most: int | None = None, **values: int) -> None:
    """Checks that each keyword argument is an integer from ``least`` to ``most``. If ``most`` is
    None, `MOST` gives the limit for the argument's name."""
    for name, value in values.items():
        if not is_whole(value) or value < least or (most is not None and value > most):
            expected = f"an integer {_span(least, most)}"
            raise ValueError(f"{op}: {name} must be {expected}, got {value!r}")
        end = next(end for names, end in MOST.items() if name.endswith(names))
        if most is None and value > end:
            raise ValueError(f"{op}: {name} must be at most {end}, got {value!r}")


def choice(op: str, allowed: Iterable[object], **values: object) -> None:
    """Checks that each keyword argument is one of the ``allowed`` values."""
    allowed = tuple(allowed)
    for name, value in values.items():
        # Compare types first, because ``==`` is elementwise for arrays and tensors.
        if not any(type(value) is type(one) and value == one for one in allowed):
            known = ", ".join(map(str, allowed))
            raise ValueError(f"{op}: {name} must be one of {known}, got {shown(value)}")


def flag(op: str, **values: bool) -> None:
    """Checks that each keyword argument is a bool."""
    _each(op, values, "True or False", lambda x: isinstance(x, bool))


def dictionary(op: str, **values: dict) -> None:
    """Checks that each keyword argument is a dict."""
    _each(op, values, "a dict", lambda x: isinstance(x, dict))
