"""A step of decoding besides its matrix products, without autograd.

On a CPU each function is one compiled op; elsewhere, and where torch traces, `best_tokens` is
several ops of torch and `deepfast.nn` attends by torch's SDPA.
"""

import math

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast.dtypes import compute_dtype
from deepfast.ops.register import watched


def compiled(x: Tensor, backend: str | None = None) -> bool:
    """Whether the compiled ops serve x, under the requested backend."""
    if x.device.type != "cpu" or not backends.compiled() or torch.is_grad_enabled() or watched(x):
        return False
    return backends.requested_backend(backend) in (None, "cpu")


def cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sentences: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    columns: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """``softmax(q K^T / sqrt(d)) V`` for one position of each hypothesis, where `compiled`.

    K and V are what the hypothesis sees of its sentence's cache. With ``new`` its own key and value
    are first written to the last of its columns. A hypothesis that sees nothing gets 0.

    Args:
        q: (R, H d), fp32, bf16, fp16 or fp64; sums are in fp32, fp64 for fp64.
        keys, values: (B, G, N, d) in q's dtype, G a divisor of H: the caches, of any strides but
            the last.
        sentences: (R,) int64: the sentence of each hypothesis.
        new: (R, G d) each, together with columns.
        columns: (R, T) int64: the columns that each hypothesis sees. None: all without padding. No
            hypothesis may see the last column of another one.
        padding: (B, N) bool, True for a column that no hypothesis sees.

    Returns:
        (R, H d).

    Raises:
        RuntimeError: for operands that do not fit.
    """
    out = q.new_empty(q.shape)
    key, value = new or (None, None)
    torch.ops.deepfast.cached_attention.default(
        q, key, value, keys, values, sentences, columns, padding, out
    )
    return out


def best_tokens(
    logits_RV: Tensor, count: int, banned: list[int], eos_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` most probable tokens of every row, best first, equal ones by id.

    ``log p_v = (x_v - max x) - log sum_v exp(x_v - max x)`` in fp32, in fp64 for fp64 logits.

    Args:
        logits_RV: (R, V), fp32, bf16, fp16 or fp64.
        count: more than V counts as V.
        banned: ids that are never returned; eos_id is not among them.

    Returns:
        Their log p and ids, (R, count) each, and the log p of eos, (R,). Where there are fewer
        tokens of a probability above 0, log p is -inf and the id means nothing. A row with NaN or
        +inf has NaN for eos.

    Raises:
        RuntimeError: for an eos_id outside the vocabulary.
    """
    count = min(count, logits_RV.shape[1])
    if not compiled(logits_RV):
        return _best_by_torch(logits_RV, count, banned, eos_id)
    logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    values = logits.new_empty(logits.shape[0], count, dtype=compute_dtype(logits.dtype))
    tokens = torch.empty_like(values, dtype=torch.int64)
    of_eos = values.new_empty(logits.shape[0])
    torch.ops.deepfast.best_tokens.default(logits, banned, eos_id, values, tokens, of_eos)
    return values, tokens, of_eos


def _best_by_torch(logits_RV: Tensor, count: int, banned: list[int], eos_id: int):
    log_probs = torch.log_softmax(logits_RV, dim=1, dtype=compute_dtype(logits_RV.dtype))
    of_eos = log_probs[:, eos_id].clone()
    for token in banned:
        log_probs[:, token] = -torch.inf
    # One more than needed shows whether the cut runs through equal values.
    values, tokens = _topk(log_probs, min(count + 1, log_probs.shape[1]))
    tokens, order = tokens.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    if values.shape[1] > count:
        last = values[:, count - 1]
        tied = ((last == values[:, count]) & (last > -torch.inf)).nonzero().squeeze(1)
        if tied.numel():
            best = values[tied, :count], tokens[tied, :count]
            tokens[tied, :count] = _lowest_ids(log_probs[tied], *best)
    return values[:, :count], tokens[:, :count], of_eos


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest values of each row and their columns, in any order.

    They are among the ``count`` groups of columns whose maxima are the largest, and the columns
    that are in no group. A maximum costs much less than a search of the whole row.
    """
    rows, size = x.shape
    width = math.isqrt(size)
    groups = size // width
    if groups < 4 * count:
        return x.topk(count, sorted=False)
    grouped = x[:, : groups * width].unflatten(1, (groups, width))
    chosen = grouped.amax(2).topk(count, sorted=False).indices
    few = grouped.gather(1, chosen.unsqueeze(2).expand(-1, -1, width)).flatten(1)
    columns = (chosen.unsqueeze(2) * width + torch.arange(width, device=x.device)).flatten(1)
    rest = torch.arange(groups * width, size, device=x.device).expand(rows, -1)
    few, columns = torch.cat((few, x[:, groups * width :]), 1), torch.cat((columns, rest), 1)
    values, places = few.topk(count, sorted=False)
    return values, columns.gather(1, places)


def _lowest_ids(log_probs: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (R, K): of all tokens that equal a row's last value, those of lowest id are taken.

    `topk` takes any of them, and such ties are common with bf16 logits.
    """
    size, count = log_probs.shape[1], values.shape[1]
    ids = torch.arange(size, device=tokens.device)
    equal = torch.where(log_probs == values[:, -1:], ids, size)
    equal = equal.topk(count, largest=False, sorted=True).values
    place = torch.arange(count, device=tokens.device)
    place = place - (values > values[:, -1:]).sum(1, keepdim=True)
    return torch.where(place >= 0, equal.gather(1, place.clamp(min=0)), tokens)
