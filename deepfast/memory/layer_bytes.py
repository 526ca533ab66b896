"""What one layer keeps for backward under each policy, and what it needs while it runs.

Elements per token, D wide, F in the feed-forward block, H heads; statistics (of softmax and
layer-norms) are fp32, everything else is in the storage dtype. With fewer heads of keys and values
these are narrower:

    encoder   keep     n or x, q k v, o, s, h      6 D + F      post-norm 7 D + F
              lean     without h                   6 D          7 D
              leaner   without q k v               3 D          4 D
              states   x                           D            D
              history  nothing
    decoder   keep     also q, o, s of its second attention, and k v: 2 D per source token

Where each sublayer reads the depth connection, no n, x or s is kept: `part_steps`. GELU and a rerun
need more while backward runs; `steps` goes through both directions.
`tests/memory/test_plan_measured.py` compares the plan with measured steps, also of random sizes.
"""

from dataclasses import dataclass
from functools import lru_cache

from deepfast.memory.part_steps import PartLayer
from deepfast.memory.sizes import Sizes
from deepfast.memory.steps import FP32, Layer, Step


@dataclass(frozen=True)
class LayerBytes:
    """One layer of a stack under one policy, in bytes of a micro-batch."""

    kept: int
    """Activations, from its forward to its backward."""
    copies: int
    """Copies of its weights, in autocast's dtype or scaled, from its forward to its backward."""
    cached: int
    """Copies from its forward to the end of the whole forward."""
    forward: tuple[Step, Step]
    """The highest step of its forward, and the boundary after it. Both include ``kept``."""
    backward: tuple[Step, ...]
    """The steps of its backward that no later step exceeds."""
    gradients: int
    """Gradients of its parameters, which exist from its backward on."""


@lru_cache(maxsize=64)
def layer_bytes(sizes: Sizes, policy: str, decoder: bool = False) -> LayerBytes:
    """One layer of the encoder, or of the decoder."""
    kind = PartLayer if sizes.parts(decoder) > 1 else Layer
    layer = kind(sizes, policy, decoder)
    cached = sum(layer.cached().values())
    *steps, boundary = layer.forward()
    return LayerBytes(
        kept=sum(layer.kept().values()),
        # Autocast's cache is freed with its context.
        copies=sum(layer.held().values()),
        cached=cached,
        forward=(max(steps, key=lambda step: step.alive), boundary),
        backward=_highest(layer.backward()),
        gradients=FP32 * sizes.layer_parameters(decoder),
    )


def _highest(steps: list[Step]) -> tuple[Step, ...]:
    """The steps that no later step exceeds. Gradients grow, so no other step can be the peak."""
    found: list[Step] = []
    for step in reversed(steps):
        if not found or step.alive > found[-1].alive:
            found.append(step)
    return tuple(found)


@dataclass(frozen=True)
class HeadBytes:
    """Embedding and projection to the vocabulary."""

    kept: int
    """Bytes per token of one side, from the embedding's forward to its backward."""
    working: int
    """While the loss and its gradients are computed."""
    gradients: int
    """Gradient of the shared weight, which exists from the loss on."""
    embedding: int
    """While an embedding's gradient is added to the existing one, beside the tokens' gradients."""


SHARE, LEAST_ROWS, WIDENED = 32, 256, 2048
"""A chunk of `deepfast.ops.linear_cross_entropy` has 1 / SHARE of the tokens, at least LEAST_ROWS.
On a CPU, WIDENED of its columns at a time are converted to fp32."""


def head_bytes(sizes: Sizes) -> HeadBytes:
    """The head's bytes by closed formulas; all 0 without a vocabulary."""
    if not sizes.vocabulary:
        return HeadBytes(kept=0, working=0, gradients=0, embedding=0)
    tokens = sizes.target_tokens if sizes.decoder_layers else sizes.tokens
    chunk = min(max(LEAST_ROWS, -(-tokens // SHARE)), tokens)
    table = sizes.vocabulary * sizes.width
    working = chunk * sizes.vocabulary * sizes.bytes + 2 * tokens * sizes.width * sizes.bytes
    # FSDP's parameters are in the storage dtype already, and so are their gradients.
    gradient = sizes.bytes if sizes.sharded else FP32
    if sizes.dtype == "bfloat16":
        working += 0 if sizes.sharded else 2 * table
        if sizes.device == "cpu":
            # The weight's gradient is summed in fp32 from operands converted part by part.
            working += FP32 * chunk * (sizes.width + min(WIDENED, sizes.vocabulary))
    # The dropout mask of embeddings: one byte per element on CUDA, an fp32 factor on the CPU.
    mask = sizes.width * (1 if sizes.device == "cuda" else FP32) if sizes.dropout else 0
    return HeadBytes(
        kept=mask,
        working=working,
        gradients=gradient * table,
        # Its own gradient, and the sum of both.
        embedding=gradient * table * 2,
    )
