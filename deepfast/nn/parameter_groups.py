"""Parameters for an optimizer that treats matrices in its own way."""

from torch import nn

from deepfast.depth.connection import DepthConnection
from deepfast.nn.connections.latent import LatentDepth
from deepfast.nn.connections.transparent import TransparentAttention

TABLES = DepthConnection, LatentDepth, TransparentAttention
"""Modules whose parameters are tables: each row belongs to another layer."""


def parameter_groups(model: nn.Module) -> list[dict]:
    """The parameters of a model in two groups for a torch optimizer.

    A depth connection's weights, queries and gains have a row for each layer. An optimizer that
    decides by the number of dimensions what is a matrix, such as Muon, would be wrong about them.

    ::

        torch.optim.AdamW(deepfast.parameter_groups(model), lr=1e-3, weight_decay=0.1)

    Returns:
        First all other parameters, and then those of depth connections with weight_decay=0. Each
        parameter that requires a gradient stands in one of them, in the order of
        ``model.parameters()``. A group may have none.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"deepfast.parameter_groups: model must be a module, got {type(model).__name__}"
        )
    tables = set[nn.Parameter]()
    for module in model.modules():
        if isinstance(module, TABLES):
            tables.update(module.parameters())
    learning = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learning if p not in tables]},
        {"params": [p for p in learning if p in tables], "weight_decay": 0.0},
    ]
