"""Depth connections in models that other people wrote, see `connect`."""

from deepfast.attach.parent import connect, disconnect
from deepfast.attach.pretrained import connected

__all__ = ["connect", "connected", "disconnect"]
