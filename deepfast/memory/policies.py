"""Memory policies: what a layer of a stack keeps from forward for backward.

Every layer also keeps one state y. Beside it:

              keeps                                     recomputes
    keep      n or x, q k v, attention's output, s, h   layer-norms and masks
    lean      without h                                 + the first feed-forward product
    leaner    without h and q k v                       + the projections of attention
    states    x                                         the layer, without its last product
    history   nothing                                   + x, mixed from the states

x is the layer's input, n its layer-norm, s the sum before the feed-forward block, h the block's
hidden activation. Where each sublayer reads the depth connection, it has a state of its own.
Every policy then recomputes its n from the states, so there is no x or s, and "states" is the same
as "history". Every policy gives the same losses and gradients; on a CPU in fp32, the same bits.
"""

from collections.abc import Sequence

from deepfast.connections import names

POLICIES = ("keep", "lean", "leaner", "states", "history")
"""From most memory to least. Each recomputes more than the one before it."""

ATTENTION_RESIDUALS, MIXING = names("attends"), names("mixes")

RERUN = ("states", "history")
"""Policies under which backward runs the layer's forward pass again."""


def resolve(
    memory: object, num_layers: int, connection: str, argument: str = "memory"
) -> tuple[str, ...]:
    """The policy of every layer.

    Args:
        memory: the name of a policy, or one name per layer.
        num_layers: L.
        connection: the stack's. "history" needs one of `MIXING`, from whose states it recomputes
            the inputs.
        argument: the name of ``memory`` in errors.

    Raises:
        ValueError: for an unknown policy, a number of policies that is not num_layers, or
            "history" without a depth connection.
    """
    if isinstance(memory, str):
        memory = (memory,) * num_layers
    if not isinstance(memory, Sequence):
        raise ValueError(
            f"{argument}: expected a policy, one for each layer, or a plan, got {memory!r}"
        )
    for policy in memory:
        if policy not in POLICIES:
            raise ValueError(f"{argument}: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if len(memory) != num_layers:
        raise ValueError(
            f"{argument}: expected one policy for each of {num_layers} layers, got {len(memory)}"
        )
    if "history" in memory and connection not in MIXING:
        raise ValueError(
            f"{argument}: 'history' recomputes inputs from the states of a depth connection "
            f"({', '.join(MIXING)}), got {connection!r}; use 'states'"
        )
    return tuple(memory)
