"""Counting bytes: what a training step keeps alive."""

from deepfast.memory.count import LiveBytes

__all__ = ["LiveBytes"]
