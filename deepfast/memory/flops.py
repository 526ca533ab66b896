"""What a training step computes, and what each policy recomputes.

Floating-point operations of a whole step, forward and backward, of T tokens in sentences of S:

    matrix products   forward 2 per weight and token, backward twice that
    attention         forward 4 S D per token, half of it where causal; backward 2.5 times that
    mixing over depth forward 2 D per token, row and source, 4 D with attention; backward recomputes
                      the input of every row, and computes the gradients of the states and of the
                      weights
"""

from deepfast.connections import BLOCKS
from deepfast.memory.sizes import Sizes
from deepfast.policies import ATTENTION_RESIDUALS, MIXING, RERUN


def _attention(sizes: Sizes, causal: bool = False) -> float:
    """Forward of one attention, per query."""
    return 4 * sizes.length * sizes.dim * (0.5 if causal else 1)


def _mix(sizes: Sizes, decoder: bool) -> float:
    """Forward of a layer's rows, per token, as the mean over rows: a row reads half of the
    sources."""
    kind, sources = sizes.kind(decoder), sizes.rows(decoder) + 1
    if kind not in MIXING:
        return 0.0
    if kind == "block_attnres":
        # A row reads the embedding and the blocks up to its own.
        sources = min(sources, BLOCKS + 3)
    channels = 2 if kind in ATTENTION_RESIDUALS else 1
    return sizes.parts(decoder) * channels * sizes.dim * sources


def layer_flops(sizes: Sizes, decoder: bool = False) -> float:
    """FLOPs of a layer with the policy `none`: forward, backward and depth mixing."""
    d, f = sizes.dim, sizes.ffn_dim
    tokens = sizes.target_tokens if decoder else sizes.tokens
    # Queries and output, keys and values.
    products = tokens * (4 * d * d + 4 * d * sizes.kv_width + 4 * d * f)
    attention = tokens * _attention(sizes, decoder)
    if decoder:
        products += tokens * 4 * d * d + sizes.tokens * 4 * d * sizes.kv_width
        attention += tokens * _attention(sizes)
    return 3 * products + 3.5 * attention + 4 * tokens * _mix(sizes, decoder)


def recomputed_flops(sizes: Sizes, policy: str, decoder: bool = False) -> float:
    """What one layer's backward recomputes under a policy."""
    d, f = sizes.dim, sizes.ffn_dim
    tokens = sizes.target_tokens if decoder else sizes.tokens
    if policy == "none":
        return 0.0
    flops: float = tokens * 2 * d * f
    if policy in RERUN:
        flops += tokens * (4 * d * d + 4 * d * sizes.kv_width + _attention(sizes, decoder))
        if decoder:
            flops += tokens * (4 * d * d + _attention(sizes))
            flops += sizes.tokens * 4 * d * sizes.kv_width
    if policy == "layer+input":
        flops += tokens * _mix(sizes, decoder)
    return flops


def step_flops(sizes: Sizes) -> float:
    """A whole step with `none`: both stacks and the projection to the vocabulary."""
    total = sizes.num_layers * layer_flops(sizes)
    if sizes.decoder_layers:
        total += sizes.decoder_layers * layer_flops(sizes, True)
    predicted = sizes.target_tokens if sizes.decoder_layers else sizes.tokens
    return total + 6 * predicted * sizes.dim * sizes.vocab_size


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
