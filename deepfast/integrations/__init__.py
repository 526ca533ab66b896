"""Fused ops in models of other packages, and the layer histories of fairseq's forks."""

from deepfast.integrations.layer_history import CreateLayerHistory, LayerHistory

__all__ = ["CreateLayerHistory", "LayerHistory"]
