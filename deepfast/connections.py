"""The connections of stacks by name: the one list that modules, planner, recipes and errors read.

To add a connection, write its class in a file of `deepfast/nn/connections/` and add a line here.
One that mixes the states of all layers also has a `DepthConnection` and a `DepthPass` in a file of
`deepfast/depth/`. The planner of memory counts each as the connection that `planned` names.
"""

from typing import NamedTuple

BLOCKS = 8
"""How many blocks of layers "block_attnres" has by default, as in the paper."""


class Kind(NamedTuple):
    """What is known of a connection without its class, which needs torch."""

    place: str
    """Module in `deepfast.nn.connections`, and in it the subclass of `Connection`."""
    planned: str
    """The connection as which the planner of memory counts it."""
    dlcl: dict | None = None
    """Where it is a `DLCL`: the arguments that it changes from their defaults."""
    mixes: bool = False
    """Whether it keeps a state of every layer, and mixes each layer's input from them."""
    attends: bool = False
    """Whether it mixes by attention over depth; then each sublayer may push and read."""
    pre_norm: bool = False
    """Whether only pre-norm stacks have it."""
    without_norm: bool = False
    """Whether a stack that has it may have no norms."""


CONNECTIONS = {
    "dlcl": Kind("dlcl.Mixed", "dlcl", dlcl={}, mixes=True),
    "residual": Kind("residual.Residual", "residual", without_norm=True),
    # Depth-weighted averages start as the identity and mix the states without layer-norms;
    # ``dilation`` and ``period`` are those of the paper (Pagliardini et al., DenseFormer, 2024).
    # The paper takes no average at the embedding and between periods. Here such a row has one
    # learned scale, which starts at 1.
    "denseformer": Kind("dlcl.Mixed", "dlcl", dlcl={"norm": None, "init": "identity"}, mixes=True),
    "attnres": Kind(
        "attention_residuals.Attended", "attnres", mixes=True, attends=True, pre_norm=True
    ),
    "block_attnres": Kind(
        "attention_residuals.Attended", "block_attnres", mixes=True, attends=True, pre_norm=True
    ),
    "latent": Kind("residual.Residual", "latent", without_norm=True),
}


def names(quality: str) -> tuple[str, ...]:
    """The connections of which a field of `Kind` is true, in the order of the list."""
    return tuple(name for name, kind in CONNECTIONS.items() if getattr(kind, quality))
