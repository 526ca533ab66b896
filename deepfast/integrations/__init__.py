"""The names that people already call, on the engine of this package."""

from deepfast.integrations.denseformer import DWAModules
from deepfast.integrations.layer_history import (
    CreateLayerHistory,
    DynamicLinearCombination,
    LayerHistory,
)
from deepfast.integrations.x_transformers import fuse_layer_integrators

__all__ = [
    "CreateLayerHistory",
    "DWAModules",
    "DynamicLinearCombination",
    "LayerHistory",
    "fuse_layer_integrators",
]
