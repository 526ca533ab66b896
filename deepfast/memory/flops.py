"""What a training step computes, and what each policy recomputes.

Floating-point operations of a whole step, forward and backward, of T tokens in sentences of S:

    matrix products   forward 2 per weight and token, backward twice that
    attention         forward 4 S D per token, half of it where causal; backward 2.5 times that
    mixing over depth forward 2 D per token, row and source, 4 D with attention; backward recomputes
                      the input of every row, and computes the gradients of the states and of the
                      weights
"""

from deepfast.connections import BLOCKS
from deepfast.memory.recording import recording
from deepfast.memory.sizes import Side, Sizes
from deepfast.policies import MIXING, RERUN


def _attentions(side: Side) -> float:
    """Forward of a layer's attentions."""
    pairs = side.tokens * (1.5 if side.name == "decoder" else 1)
    return 4 * side.sizes.length * side.sizes.dim * pairs


def _mix(side: Side) -> float:
    """Forward of a layer's rows, as the mean over rows: a row reads half of the sources."""
    if side.connection not in MIXING:
        return 0.0
    sources = side.rows + 1
    if side.connection == "block_attnres":
        # A row reads the embedding and the blocks up to its own.
        sources = min(sources, BLOCKS + 3)
    products = 2 if side.attends else 1
    return side.tokens * side.parts * products * side.sizes.dim * sources


def recomputed_flops(side: Side, policy: str) -> float:
    """What one layer's backward recomputes under a policy."""
    layers = recording(side.sizes).layers[side.name]
    flops: float = layers[policy].backward_flops - layers["none"].backward_flops
    if policy in RERUN:
        flops += _attentions(side)
    if policy == "layer+input":
        flops += _mix(side)
    return flops


def step_flops(sizes: Sizes) -> float:
    """A whole step with `none`: both stacks and the projection to the vocabulary."""
    total = 6.0 * sizes.sides[-1].tokens * sizes.dim * sizes.vocab_size
    for side in sizes.sides:
        layer = recording(sizes).layers[side.name]["none"]
        flops: float = layer.forward_flops + layer.backward_flops
        total += side.layers * (flops + 3.5 * _attentions(side) + 4 * _mix(side))
    return total


def relative_time(sizes: Sizes, *policies: tuple[str, ...]) -> float:
    """Predicted time of a step relative to `none`: 1 plus the share of recomputed FLOPs.

    policies: of the layers of each side, from the bottom.
    """
    extra = sum(
        names.count(policy) * recomputed_flops(side, policy)
        for side, names in zip(sizes.sides, policies, strict=False)
        for policy in set(names)
    )
    return 1 + extra / step_flops(sizes)
