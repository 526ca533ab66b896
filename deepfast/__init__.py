"""deepfast: very deep Transformers whose layers read all layers below them, at full speed.

deepfast.ops      fused ops with autograd
deepfast.nn       DLCL, DepthHistory, Transformer layers and stacks
deepfast.connect  puts a depth connection into a model that you already have
deepfast.memory   the memory of a training step, counted and planned
deepfast.mt       the translation toolkit: data, models, training, search
"""

import importlib
from typing import TYPE_CHECKING

from deepfast.version import __version__

if TYPE_CHECKING:
    from deepfast import memory, mt, nn, ops
    from deepfast.attach import connect, connected, disconnect

PACKAGES = ("memory", "mt", "nn", "ops")
ATTACH = ("connect", "connected", "disconnect")
__all__ = ["__version__", "connect", "connected", "disconnect", "memory", "mt", "nn", "ops"]


def __getattr__(name: str):
    # Imported on first use, because torch takes seconds to import and planning does not need it.
    if name in PACKAGES:
        return importlib.import_module(f"deepfast.{name}")
    if name in ATTACH:
        return getattr(importlib.import_module("deepfast.attach"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
