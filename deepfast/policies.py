"""Recompute policies: what backward recomputes of a layer, and what the layer keeps for it.

Every layer also keeps one state y. Beside it:

                  recomputes                            keeps
    none          layer-norms and masks                 n or x, q k v, attention's output, s, h
    ffn           + the first feed-forward product      without h
    layer         the layer, without its last product   x
    layer+input   + x, mixed from the states            nothing

x is the layer's input, n its layer-norm, s the sum before the feed-forward block, h the block's
hidden activation. Where each sublayer reads the depth connection, it has a state of its own.
Every policy then recomputes its n from the states, so there is no x or s, and "layer" is the same
as "layer+input". Every policy gives the same losses and gradients; on a CPU in fp32, the same bits.
"""

from collections.abc import Sequence

from deepfast.connections import names

POLICIES = ("none", "ffn", "layer", "layer+input")
"""From most memory to least. Each recomputes more than the one before it."""

ATTENTION_RESIDUALS, MIXING = names("attends"), names("mixes")

RERUN = ("layer", "layer+input")
"""Policies under which backward runs the layer's forward pass again."""


def policies_of(connection: str) -> tuple[str, ...]:
    """The policies of a layer in a stack with this connection: without the states of all layers
    nothing can recompute an input."""
    return POLICIES if connection in MIXING else POLICIES[:-1]


def resolve(
    recompute: object, num_layers: int, connection: str, argument: str = "recompute"
) -> tuple[str, ...]:
    """The policy of every layer.

    Args:
        recompute: the name of a policy, or one name per layer.
        num_layers: L.
        connection: the stack's. "layer+input" needs one of `MIXING`, from whose states it
            recomputes the inputs.
        argument: the name of ``recompute`` in errors.

    Raises:
        ValueError: for an unknown policy, a number of policies that is not num_layers, or
            "layer+input" without a depth connection.
    """
    if isinstance(recompute, str):
        recompute = (recompute,) * num_layers
    if not isinstance(recompute, Sequence):
        raise ValueError(
            f"{argument}: expected a policy, one for each layer, or a plan, got {recompute!r}"
        )
    for policy in recompute:
        if policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"{argument}: expected one of {known}, got {policy!r}")
    if len(recompute) != num_layers:
        raise ValueError(
            f"{argument}: expected one policy for each of {num_layers} layers, got {len(recompute)}"
        )
    if "layer+input" in recompute and connection not in MIXING:
        raise ValueError(
            f"{argument}: 'layer+input' recomputes inputs from the states of "
            f"{', '.join(MIXING)}, got {connection!r}; use 'layer'"
        )
    return tuple(recompute)
