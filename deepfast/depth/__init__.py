"""The depth connection: every layer reads a combination of all layers below it."""

from deepfast.depth.attention_residuals import AttentionResiduals, ResidualHistory
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory

__all__ = ["DLCL", "AttentionResiduals", "DepthHistory", "ResidualHistory"]
