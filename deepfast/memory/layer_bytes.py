"""What one layer keeps for backward under each policy, and what it needs while it runs.

Elements per token, D wide, F in the feed-forward block, H heads; statistics (of softmax and
layer-norms) are fp32, everything else is in the storage dtype:

    encoder   keep     n or x, q k v, o, s, h      6 D + F      post-norm 7 D + F
              lean     without h                   6 D          7 D
              leaner   without q k v               3 D          4 D
              states   x                           D            D
              history  nothing
    decoder   keep     and q, o, s of its second attention, and k v: 2 D per source token

Closed forms by counting, held to measured steps by `tests/memory/test_plan_measured.py`.
"""

from dataclasses import dataclass

from .policies import POLICIES, RERUN
from .sizes import Sizes

FP32 = 4


@dataclass(frozen=True)
class LayerBytes:
    """One layer of a stack under one policy, in bytes of a micro-batch."""

    kept: int
    """From its forward to its backward: activations."""
    copies: int
    """From its forward to its backward: copies of its weights in the dtype of autocast."""
    cached: int
    """The same from its forward to the end of the whole forward."""
    forward: int
    """On top while its forward runs."""
    backward: int
    """On top of what it keeps while its backward runs, made again or born there."""
    gradients: int
    """Of its parameters, from its backward on."""


def layer_bytes(sizes: Sizes, policy: str, decoder: bool = False) -> LayerBytes:
    """One layer; ``decoder`` says of which stack."""
    low = sizes.dtype == "bfloat16"
    copies = 2 * (sizes.decoder_linear if decoder else sizes.linear) if low else 0
    kept = _kept(sizes, policy, decoder)
    return LayerBytes(
        kept=kept,
        # What runs again casts again, and autocast's own cache goes with its context.
        copies=0 if policy in RERUN else copies,
        cached=copies,
        forward=_forward(sizes, policy, decoder),
        backward=_backward(sizes, policy, decoder) + (copies if policy in RERUN else 0),
        gradients=FP32 * sizes.layer_parameters(decoder),
    )


def _units(sizes: Sizes, decoder: bool) -> tuple[int, int, int]:
    """Bytes of (T, D) and (T, F) of the stack, and of (T, D) of the source."""
    tokens = sizes.target_tokens if decoder else sizes.tokens
    element = sizes.bytes
    return (
        tokens * sizes.width * element,
        tokens * sizes.ffn * element,
        sizes.tokens * sizes.width * element,
    )


def _kept(sizes: Sizes, policy: str, decoder: bool) -> int:
    d, f, source = _units(sizes, decoder)
    if policy == "history":
        return 0
    if policy == "states":
        return d
    tokens = sizes.target_tokens if decoder else sizes.tokens
    attentions = 2 if decoder else 1
    post = sizes.norm == "post"
    level = POLICIES.index(policy)
    # The input; of an attention its result and the sum behind it; in post-norm also the sum behind
    # the feed-forward block.
    kept = d + 2 * attentions * d + (d if post else 0)
    kept += tokens * FP32 * (attentions * (sizes.heads + 2) + (2 if post else 0))
    # Attention's result, padded and packed.
    kept += attentions * d if sizes.padding else 0
    if level < POLICIES.index("leaner"):
        kept += 3 * d + (d + 2 * source if decoder else 0)
    if level < POLICIES.index("lean"):
        kept += f
    return kept


def _forward(sizes: Sizes, policy: str, decoder: bool) -> int:
    """Largest in the feed-forward block: a norm, the hidden activation, a branch."""
    d, f, _ = _units(sizes, decoder)
    if policy in RERUN:
        return 3 * d + 2 * f
    return 2 * d + (0 if policy == "keep" else f)


def _backward(sizes: Sizes, policy: str, decoder: bool) -> int:
    """The feed-forward block's backward, or an attention's where that is larger."""
    d, f, source = _units(sizes, decoder)
    level, post = POLICIES.index(policy), sizes.norm == "post"
    weights = 2 * sizes.width * sizes.ffn
    # Gradients of the layer's last residual and branch, and the norm made again; in post-norm the
    # sum behind the block is given back first.
    block = (2 * d if post else 3 * d) + f + sizes.bytes * weights
    attention = (3 * d if post else 4 * d) + FP32 * weights
    # Gradients of q k v, padded and packed.
    attention += 3 * d if sizes.padding else 0
    if policy in RERUN:
        # All that `keep` keeps is there again; the input that was kept is one of its parts in
        # post-norm, where pre-norm's is the norm of it.
        again = _kept(sizes, "keep", decoder)
        again -= d if post and policy == "states" else 0
        again += d if decoder else 0
        # GELU keeps what it reads: the last product's operand goes before its gradient comes.
        again += d if sizes.activation == "gelu" else 0
        # One of the block's two matrices has its gradient by then.
        block = again + d + 2 * f + sizes.bytes * weights // 2
        attention += again - f
    elif policy == "keep":
        attention -= f
    else:
        block += f
        if level == POLICIES.index("leaner"):
            attention += 3 * d + (d + 2 * source if decoder else 0)
    return max(block, attention)


@dataclass(frozen=True)
class HeadBytes:
    """Embedding and projection to the vocabulary."""

    kept: int
    """From the embedding to its backward, of one side."""
    working: int
    """While the loss and its gradients are made."""
    gradients: int
    """Of the shared weight, from the loss on."""
    embedding: int
    """While the embedding's gradient is added to the projection's."""


SHARE, LEAST_ROWS, WIDENED = 32, 256, 2048
"""Chunks of `deepfast.ops.linear_cross_entropy`: a share of all tokens, and at least so many; and
the columns of a chunk that a CPU widens at once."""


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
        # The decoder's side, or the encoder's, and the sum of what is there.
        embedding=FP32 * table * 2 + 2 * FP32 * sizes.tokens * sizes.width,
    )
