"""deepfast: very deep Transformers whose layers read all layers below them, at full speed.

deepfast.ops      fused ops with autograd
deepfast.nn       DLCL, DepthHistory, Transformer layers and stacks
deepfast.models   whole models
"""

from . import nn, ops
from .version import __version__

__all__ = ["__version__", "nn", "ops"]
