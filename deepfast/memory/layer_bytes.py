"""What one layer keeps for backward under each policy, and what it needs while it runs.

Elements per token, D wide, F in the feed-forward block, H heads; statistics (of softmax and
layer-norms) are fp32, everything else is in the storage dtype:

    encoder   keep     n or x, q k v, o, s, h      6 D + F      post-norm 7 D + F
              lean     without h                   6 D          7 D
              leaner   without q k v               3 D          4 D
              states   x                           D            D
              history  nothing
    decoder   keep     and q, o, s of its second attention, and k v: 2 D per source token

GELU and a rerun keep more while backward runs: `steps` walks through both directions.
`tests/memory/test_plan_measured.py` compares with measured steps, of random sizes too.
"""

from dataclasses import dataclass
from functools import lru_cache

from deepfast.memory.policies import RERUN
from deepfast.memory.sizes import Sizes
from deepfast.memory.steps import FP32, Layer, Step


@dataclass(frozen=True)
class LayerBytes:
    """One layer of a stack under one policy, in bytes of a micro-batch."""

    kept: int
    """From its forward to its backward: activations."""
    copies: int
    """From its forward to its backward: copies of its weights, in autocast's dtype or scaled."""
    cached: int
    """Copies from its forward to the end of the whole forward."""
    forward: tuple[Step, Step]
    """The highest step of its forward, and the boundary after it; with what the layer keeps."""
    backward: tuple[Step, ...]
    """Steps of its backward, without those that a later step exceeds."""
    gradients: int
    """Gradients of its parameters, from its backward on."""


@lru_cache(maxsize=64)
def layer_bytes(sizes: Sizes, policy: str, decoder: bool = False) -> LayerBytes:
    """One layer of the encoder, or of the decoder."""
    layer = Layer(sizes, policy, decoder)
    cached = sum(layer.cached().values())
    *steps, boundary = layer.forward()
    return LayerBytes(
        kept=sum(layer.kept().values()),
        # A rerun makes its copies again, and autocast's cache ends with its context.
        copies=0 if policy in RERUN else cached,
        cached=cached,
        forward=(max(steps, key=lambda step: step.alive), boundary),
        backward=_highest(layer.backward()),
        gradients=FP32 * sizes.layer_parameters(decoder),
    )


def _highest(steps: list[Step]) -> tuple[Step, ...]:
    """Without the steps that are never the peak: gradients grow, and a later step is higher."""
    found: list[Step] = []
    for step in reversed(steps):
        if not found or step.alive > found[-1].alive:
            found.append(step)
    return tuple(found)


@dataclass(frozen=True)
class HeadBytes:
    """Embedding and projection to the vocabulary."""

    kept: int
    """Of one side, from the embedding's forward to its backward."""
    working: int
    """While the loss and its gradients are made."""
    gradients: int
    """Of the shared weight, from the loss on."""
    embedding: int
    """While an embedding's gradient is added to the existing one, beside the tokens' gradients."""


SHARE, LEAST_ROWS, WIDENED = 32, 256, 2048
"""A chunk of `deepfast.ops.linear_cross_entropy` has 1 / SHARE of the tokens, at least LEAST_ROWS.
A CPU widens WIDENED of its columns at once."""


def head_bytes(sizes: Sizes) -> HeadBytes:
    """Closed forms; all zero where there is no vocabulary."""
    if not sizes.vocabulary:
        return HeadBytes(kept=0, working=0, gradients=0, embedding=0)
    tokens = sizes.target_tokens if sizes.decoder_layers else sizes.tokens
    chunk = min(max(LEAST_ROWS, -(-tokens // SHARE)), tokens)
    table = sizes.vocabulary * sizes.width
    working = chunk * sizes.vocabulary * sizes.bytes + 2 * tokens * sizes.width * sizes.bytes
    if sizes.dtype == "bfloat16":
        working += 2 * table
        if sizes.device == "cpu":
            # The gradient of the weight is summed in fp32 from widened operands, part by part.
            working += FP32 * chunk * (sizes.width + min(WIDENED, sizes.vocabulary))
    # Dropout of embeddings: a byte an element on CUDA, a factor in fp32 on the CPU.
    mask = sizes.width * (1 if sizes.device == "cuda" else FP32) if sizes.dropout else 0
    return HeadBytes(
        kept=mask,
        working=working,
        gradients=FP32 * table,
        # Its own, and the sum of both.
        embedding=FP32 * table * 2,
    )
