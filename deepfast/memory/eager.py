"""Predicts the peak memory of the same models in plain PyTorch, for comparison.

For each token, a layer in plain PyTorch saves

    in fp32                 its input, the sum before its feed-forward block, and what layer-norms
                            read
    in the storage dtype    the operands of its matrix products
    and                     the masks of dropout

DLCL adds y_k and LN_k(y_k), in fp32. "stack and sum" also saves a stack of all lower states for
each layer. Under autocast the residual stream is in fp32, because layer-norm returns fp32.
"""

from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.steps import FP32
from deepfast.memory.timeline import margin

STACK, LOOP, RESIDUAL, CHECKPOINTED = (
    "stack and sum", "loop of adds", "plain residual", "plain, checkpointed"
)  # fmt: skip
EAGER = (STACK, LOOP, RESIDUAL, CHECKPOINTED)
"""In this order: DLCL as in the paper's code; DLCL as a loop of adds; no depth connection; no depth
connection and `torch.utils.checkpoint` around each layer."""


def _layer(sizes: Sizes, decoder: bool) -> int:
    """Bytes per token that autograd saves for one layer."""
    d, b = sizes.dim, sizes.bytes
    # A dropout mask has one byte per element on CUDA, and the tensor's dtype on the CPU.
    mask = (1 if sizes.device == "cuda" else b) if sizes.dropout else 0
    operands = b * (3 * d + 2 * sizes.kv_width)
    attention = FP32 * d + 2 * FP32 + operands + FP32 * sizes.num_heads + mask * d
    block = FP32 * d + 2 * FP32 + b * (d + sizes.ffn_dim) + mask * d
    return block + attention * (2 if decoder else 1)


def _low(sizes: Sizes, form: str) -> int:
    """Bytes of autocast's copies of weights that are alive after forward."""
    if sizes.dtype != "bfloat16":
        return 0
    weights = sizes.vocab_size * sizes.dim
    if form != CHECKPOINTED:
        weights += sizes.num_layers * sizes.linear + sizes.decoder_layers * sizes.decoder_linear
    return 2 * weights


def eager_peak(sizes: Sizes, form: str) -> int:
    """Peak bytes of a training step in plain PyTorch.

    Args:
        form: one of `EAGER`, for the encoder. The decoder is always plain residual.

    Raises:
        ValueError: for an unknown form.
    """
    if form not in EAGER:
        raise ValueError(f"form: expected one of {', '.join(EAGER)}, got {form!r}")
    d, t, target = sizes.dim, sizes.tokens, sizes.target_tokens
    checkpointed = form == CHECKPOINTED
    per_layer = (FP32 * d if checkpointed else _layer(sizes, False)) * t
    if form in (STACK, LOOP):
        per_layer += 2 * (FP32 * d + 2 * FP32) * t
    kept = sizes.num_layers * per_layer
    if form == STACK:
        kept += FP32 * d * t * (sizes.num_layers + 1) * (sizes.num_layers + 2) // 2
    predicted = t
    if sizes.decoder_layers:
        kept += sizes.decoder_layers * target * (
            FP32 * d if checkpointed else _layer(sizes, True)
        )  # fmt: skip
        predicted = target
    # The embedding, its dropout mask, the final norm, and the operand of the output projection.
    kept += (3 * FP32 * d) * (t + (target if sizes.decoder_layers else 0))
    logits = FP32 * predicted * sizes.vocab_size
    decoder = bool(sizes.decoder_layers)
    top = (target if decoder else t) * _layer(sizes, decoder) if checkpointed else 0
    working = 2 * sizes.bytes * sizes.ffn_dim * predicted
    if form == STACK:
        # The gradient of the largest stack, and the product of the stack and its weights.
        working = max(working, 2 * FP32 * d * t * (sizes.num_layers + 1))
    gradients = FP32 * sizes.parameters
    copies = _low(sizes, form)
    full = kept + copies
    moments = (
        full + 3 * logits,
        full + FP32 * sizes.vocab_size * d + top + working,
        gradients + (t * _layer(sizes, False) if checkpointed else per_layer) + working,
    )
    peak = (FP32 + OPTIMIZERS[sizes.optimizer]) * sizes.parameters + max(moments)
    return peak + margin(sizes, peak)
