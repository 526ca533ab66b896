"""Attention without padding for Hugging Face transformers, under the name "deepfast".

transformers asks one function for the mask of a forward pass and gives its result to another one in
each layer. The mask function here gives the padding (B, K) alone. A name without a mask function
gets no mask at all there, and would read the padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepfast import ops
from deepfast.nn.packing import Packing

NAME = "deepfast"
OP = "deepfast.patch(attention=True)"
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that change the result and that are not supported."""


def register() -> None:
    """Tells transformers the name."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    causal = masking_utils.causal_mask_function
    # transformers 4 has none.
    bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)

    def mask(*args, **kwargs):
        return _mask(causal, bidirectional, *args, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def _mask(
    causal: Callable,
    bidirectional: Callable | None,
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **_,
) -> Tensor | None:
    """Which keys are tokens, (B, K) bool; None where all are."""
    if cache_position is not None:
        # transformers 4
        q_length, q_offset = len(cache_position), cache_position[0]
    start = int(q_offset)
    sizes = batch_size, start, q_length, kv_length
    if mask_function is not causal and mask_function is not bidirectional:
        pattern = _pattern(mask_function, *sizes)
        if bool((pattern == _pattern(causal, *sizes)).all()):
            mask_function = causal
        elif not pattern.all():
            raise ValueError(
                f"{OP}: the model asks for another mask than causal or full attention, such as a "
                "sliding window or sequences that position_ids pack; leave its attention as it is"
            )
    if mask_function is causal and start + q_length != kv_length:
        raise ValueError(
            f"{OP}: a query must be able to read all {kv_length} keys up to its own, got queries "
            f"up to {start + q_length}; a static cache is not supported"
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()


def _pattern(function: Callable, batch: int, start: int, queries: int, keys: int) -> Tensor:
    """(1 or B, 1, Q, K): what a mask function of transformers allows."""
    b, h, k = torch.arange(batch), torch.zeros(1, dtype=torch.int64), torch.arange(keys)
    q = torch.arange(start, start + queries)
    return function(b.view(-1, 1, 1, 1), h.view(1, 1, 1, 1), q.view(1, 1, -1, 1), k).cpu()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, H, S, d) to (B, S, H, d), zero at padding."""
    _check(attention_mask, key, options)
    batch, heads, length, dim = query.shape
    keys = key.shape[2]
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    to = _packing(attention_mask, batch, keys)
    # Only in self-attention are the last keys the queries' own positions.
    own = causal or not _may_cross(module)
    at = to if own and length == keys else Packing(batch, length)
    if own and length < keys:
        tail = None if attention_mask is None else attention_mask[:, -length:]
        at = _packing(tail, batch, length)

    def packed(x: Tensor, packing: Packing) -> Tensor:
        return packing.pack(x.transpose(1, 2).flatten(2)).unflatten(-1, (heads, -1))

    out = ops.attention(
        packed(query, at), packed(key, to), packed(value, to),
        cu_seqlens_q=at.cu_seqlens(query.device), cu_seqlens_k=to.cu_seqlens(query.device),
        max_seqlen_q=length, max_seqlen_k=keys, causal=bool(causal) and length > 1,
        dropout_p=dropout, scale=scaling,
    )  # fmt: skip
    return at.unpack(out.flatten(1)).unflatten(-1, (heads, dim)), None


def _check(mask: Tensor | None, key: Tensor, options: dict) -> None:
    found = [name for name in UNKNOWN if options.get(name) is not None]
    if found == ["sliding_window"] and key.shape[2] <= options["sliding_window"]:
        found = []
    if found:
        raise ValueError(f"{OP}: this model's attention uses {', '.join(found)}; leave it as it is")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"{OP}: expected a padding mask (B, K), got {tuple(mask.shape)}")
    if mask is not None and torch.compiler.is_compiling():
        raise RuntimeError(f"{OP}: padding is not supported under torch.compile")


def _may_cross(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    names = ("is_encoder_decoder", "add_cross_attention")
    return config is None or any(getattr(config, name, False) for name in names)


def _packing(mask: Tensor | None, batch: int, length: int) -> Packing:
    """Where the tokens are; once for all layers that get the same mask."""
    if mask is None:
        return Packing(batch, length)
    found = getattr(mask, "deepfast_packing", None)
    if found is None:
        found = mask.deepfast_packing = Packing.of(batch, length, ~mask)  # type: ignore[attr-defined]
    return found
