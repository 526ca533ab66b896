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
from deepfast.memory.sizes import Sizes
from deepfast.policies import ATTENTION_RESIDUALS, MIXING, RERUN


def _attentions(sizes: Sizes, decoder: bool) -> float:
    """Forward of a layer's attentions."""
    pairs = (1.5 * sizes.target_tokens) if decoder else sizes.tokens
    return 4 * sizes.length * sizes.dim * pairs


def _mix(sizes: Sizes, decoder: bool) -> float:
    """Forward of a layer's rows, as the mean over rows: a row reads half of the sources."""
    kind, sources = sizes.kind(decoder), sizes.layers(decoder) * sizes.parts(decoder) + 2
    if kind not in MIXING:
        return 0.0
    if kind == "block_attnres":
        # A row reads the embedding and the blocks up to its own.
        sources = min(sources, BLOCKS + 3)
    channels = 2 if kind in ATTENTION_RESIDUALS else 1
    tokens = sizes.target_tokens if decoder else sizes.tokens
    return tokens * sizes.parts(decoder) * channels * sizes.dim * sources


def recomputed_flops(sizes: Sizes, policy: str, decoder: bool = False) -> float:
    """What one layer's backward recomputes under a policy."""
    layers = recording(sizes).layers[decoder]
    flops: float = layers[policy].backward_flops - layers["none"].backward_flops
    if policy in RERUN:
        flops += _attentions(sizes, decoder)
    if policy == "layer+input":
        flops += _mix(sizes, decoder)
    return flops


def step_flops(sizes: Sizes) -> float:
    """A whole step with `none`: both stacks and the projection to the vocabulary."""
    predicted = sizes.target_tokens if sizes.decoder_layers else sizes.tokens
    total = 6.0 * predicted * sizes.dim * sizes.vocab_size
    for side, layers in enumerate(recording(sizes).layers):
        decoder, layer = bool(side), layers["none"]
        flops: float = layer.forward_flops + layer.backward_flops
        flops += 3.5 * _attentions(sizes, decoder) + 4 * _mix(sizes, decoder)
        total += sizes.layers(decoder) * flops
    return total


def relative_time(
    sizes: Sizes, policies: tuple[str, ...], decoder_recompute: tuple[str, ...]
) -> float:
    """Predicted time of a step relative to `none`: 1 plus the share of recomputed FLOPs."""
    extra = sum(
        side.count(policy) * recomputed_flops(sizes, policy, decoder)
        for decoder, side in ((False, policies), (True, decoder_recompute))
        for policy in set(side)
    )
    return 1 + extra / step_flops(sizes)
