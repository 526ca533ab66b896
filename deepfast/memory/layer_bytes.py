"""What one layer keeps for backward under each policy, and what it needs while it runs.

All in bytes of one micro-batch. ``b`` bytes an element, T tokens, D, F, H as in `Sizes`.
"""

from dataclasses import dataclass

from .policies import POLICIES
from .sizes import Sizes

FP32 = 4


@dataclass(frozen=True)
class LayerBytes:
    """One layer of a stack under one policy."""

    kept: int
    """From its forward to its backward: activations."""
    copies: int
    """From its forward to its backward: low-precision copies of its weights."""
    forward: int
    """On top while its forward runs."""
    backward: int
    """On top of what it keeps while its backward runs, made again or born there; its gradients
    apart."""
    gradients: int
    """Of its parameters, from its backward on."""


def layer_bytes(sizes: Sizes, policy: str, decoder: bool = False) -> LayerBytes:
    """Closed forms, calibrated against measured steps (`tests/memory/test_plan_measured.py`)."""
    kept = _kept(sizes, policy, decoder)
    linear = sizes.decoder_linear if decoder else sizes.linear
    low = sizes.dtype == "bfloat16"
    forward, backward = _working(sizes, policy, decoder)
    return LayerBytes(
        kept=kept,
        copies=2 * linear if low and policy not in ("states", "history") else 0,
        forward=forward,
        backward=backward,
        gradients=FP32 * sizes.layer_parameters(decoder),
    )


def _tokens(sizes: Sizes, decoder: bool) -> int:
    return sizes.target_tokens if decoder else sizes.tokens


def _kept(sizes: Sizes, policy: str, decoder: bool) -> int:
    level = POLICIES.index(policy)
    t, b = _tokens(sizes, decoder), sizes.bytes
    d, f = t * sizes.width * b, t * sizes.ffn * b
    statistics, per_head = 2 * t * FP32, t * sizes.heads * FP32
    if policy == "history":
        return 0
    if policy == "states":
        return d
    # x or its norm, attention's output, the sum behind it, and their statistics.
    kept = 3 * d + per_head + statistics
    if level < POLICIES.index("leaner"):
        kept += 3 * d
    if level < POLICIES.index("lean"):
        kept += f
    return kept


def _working(sizes: Sizes, policy: str, decoder: bool) -> tuple[int, int]:
    t, b = _tokens(sizes, decoder), sizes.bytes
    d, f = t * sizes.width * b, t * sizes.ffn * b
    return 4 * d + 2 * f, 4 * d + 2 * f


@dataclass(frozen=True)
class HeadBytes:
    """Embedding and projection to the vocabulary."""

    working: int
    """While the loss and its gradients are made."""
    gradients: int
    """Of the embedding, from the loss on."""
    embedding: int
    """While the embedding's gradient is added to the projection's."""


def head_bytes(sizes: Sizes) -> HeadBytes:
    v = sizes.vocabulary * sizes.width * FP32
    return HeadBytes(working=v, gradients=v, embedding=v)
