"""Attention without padding for Hugging Face transformers, under the name "deepfast".

transformers asks one function for the mask of a forward pass and gives its result to another one in
each layer. The mask function here gives the padding (B, K) alone, and a sliding window as an
attribute of it. A name without a mask function gets no mask at all there, and would read the
padding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.nn.packing import Packing

NAME = "deepfast"
OP = "deepfast.patch(attention=True)"
UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that change the result and that are not supported."""
FULL, CAUSAL = (-1, -1), (-1, 0)
"""The windows (left, right) of attention without a sliding window, see `ops.attention`."""


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
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: torch.device | None = None,
    **_,
) -> Tensor | None:
    """Which keys are tokens, (B, K) bool; None where all are and there is no sliding window."""
    if cache_position is not None:
        # transformers 4
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    start, stop = int(q_offset), kv_offset + kv_length
    window = FULL if mask_function is bidirectional else CAUSAL
    if mask_function is not causal and mask_function is not bidirectional:
        queries, keys = range(start, start + q_length), range(kv_offset, stop)
        window = _window(mask_function, batch_size, queries, keys)
    if window != FULL and start + q_length != stop:
        raise ValueError(
            f"{OP}: a query must be able to read all {stop} keys up to its own, got queries up to "
            f"{start + q_length}; a static cache is not supported"
        )
    mask = None if attention_mask is None else attention_mask[:, -kv_length:].bool()
    if window in (FULL, CAUSAL):
        return mask
    if mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    elif (mask & ~F.pad(mask, (1, 0))[:, :-1]).sum(1).max() > 1:
        raise ValueError(
            f"{OP}: with a sliding window, padding must be before or after a sentence, got "
            "padding between its tokens"
        )
    mask.deepfast_window = window  # type: ignore[attr-defined]
    return mask


def _window(function: Callable, batch: int, queries: range, keys: range) -> tuple[int, int]:
    """The window (left, right) that a mask function of transformers allows at these positions."""
    q, k = torch.tensor(queries)[:, None], torch.tensor(keys)
    b, h = torch.arange(batch), torch.zeros(1, dtype=torch.int64)
    allowed = function(b.view(-1, 1, 1, 1), h.view(1, 1, 1, 1), q[None, None], k).cpu()
    before = q - k
    sides = [int((allowed * side).max()) for side in (before, -before)]
    if not (allowed == (before <= sides[0]) & (-before <= sides[1])).all():
        raise ValueError(
            f"{OP}: the model asks for another mask than causal or full attention or a sliding "
            "window, such as sequences that position_ids pack; leave its attention as it is"
        )
    # A side that no query reaches the end of has no end.
    left, right = (
        -1 if side >= reach.max() else side
        for side, reach in zip(sides, (before, -before), strict=True)
    )
    return left, right


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
    window = getattr(attention_mask, "deepfast_window", None)
    _check(attention_mask, key, window, options)
    batch, heads, length, dim = query.shape
    keys = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A window has its right side.
    causal = bool(causal) and window is None
    to = _packing(attention_mask, batch, keys)
    # Only in self-attention are the last keys the queries' own positions.
    own = causal or window is not None or not _may_cross(module)
    at = to if own and length == keys else Packing(batch, length)
    if own and length < keys:
        tail = None if attention_mask is None else attention_mask[:, -length:]
        at = _packing(tail, batch, length)

    def packed(x: Tensor, packing: Packing) -> Tensor:
        return packing.pack(x.transpose(1, 2).flatten(2)).unflatten(-1, (-1, dim))

    out = ops.attention(
        packed(query, at), packed(key, to), packed(value, to),
        cu_seqlens_q=at.cu_seqlens(query.device), cu_seqlens_k=to.cu_seqlens(query.device),
        max_seqlen_q=length, max_seqlen_k=keys, dropout_p=dropout,
        causal=causal and length > 1, window=window, scale=scaling,
    )  # fmt: skip
    return at.unpack(out.flatten(1)).unflatten(-1, (heads, dim)), None


def _check(mask: Tensor | None, key: Tensor, window: object, options: dict) -> None:
    found = [name for name in UNKNOWN if options.get(name) is not None]
    if window is None and key.shape[2] > (options.get("sliding_window") or key.shape[2]):
        # The model did not ask for a mask with this window.
        found.append("sliding_window")
    if found:
        raise ValueError(f"{OP}: this model's attention uses {', '.join(found)}; leave it as it is")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"{OP}: expected a padding mask (B, K), got {tuple(mask.shape)}")
    if mask is not None and torch.compiler.is_compiling():
        raise RuntimeError(
            f"{OP}: padding and sliding windows are not supported under torch.compile"
        )


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
