"""The memory of a training step: counted (`LiveBytes`, `measure`) or predicted (`plan`)."""

from deepfast.memory.count import LiveBytes
from deepfast.memory.measure import Measured, measure
from deepfast.memory.plan import Plan, plan
from deepfast.memory.units import format_bytes, parse_bytes
from deepfast.policies import POLICIES, resolve

__all__ = [
    "POLICIES",
    "LiveBytes",
    "Measured",
    "Plan",
    "format_bytes",
    "measure",
    "parse_bytes",
    "plan",
    "resolve",
]
