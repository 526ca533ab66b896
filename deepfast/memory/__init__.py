"""Memory: what layers keep for backward, and counting what a training step keeps alive."""

from deepfast.memory.count import LiveBytes
from deepfast.memory.policies import POLICIES

__all__ = ["POLICIES", "LiveBytes"]
