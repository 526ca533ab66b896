"""Forced decoding: the probability that a model gives to known translations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepfast.mt.data.vocabulary import BOS, EOS
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import evaluating


def score_hypotheses(
    model: SearchModel,
    source_BS: Tensor,
    hypotheses: Sequence[Sequence[Sequence[int]]],
    *,
    bos_id: int = BOS,
    eos_id: int = EOS,
) -> list[list[float]]:
    """Log-probabilities ``log P(Y|X)`` of given translations, natural, eos included.

    The same quantity as `deepfast.mt.search.Hypothesis.log_prob`, for any translation. The source
    is encoded once, however many translations it has.

    Args:
        model: see `deepfast.mt.models.interface`; in evaluation mode for the call.
        source_BS: (B, S) int64 on the model's device, each sentence with its eos.
        hypotheses: for each sentence any number of translations, token ids without bos and eos.
        bos_id, eos_id: ids of the special tokens.

    Returns:
        For each sentence the log-probability of each of its translations, summed in fp64.

    Raises:
        ValueError: not one list of translations for each sentence.
    """
    if len(hypotheses) != len(source_BS):
        raise ValueError(
            f"score_hypotheses: expected translations of {len(source_BS)} sentences, got "
            f"{len(hypotheses)}"
        )
    rows = [list(tokens) for given in hypotheses for tokens in given]
    if not rows:
        return [[] for _ in hypotheses]
    with torch.inference_mode(), evaluating(model):
        state = model.start(source_BS)
        counts = torch.tensor([len(given) for given in hypotheses])
        index = torch.arange(len(hypotheses)).repeat_interleave(counts)
        state.reorder(index.to(source_BS.device))
        # The batch is a rectangle: positions after a row's eos are computed but not counted.
        longest, pad = max(map(len, rows)), model.config.padding_idx
        filled = [row + [eos_id] + [pad] * (longest - len(row)) for row in rows]
        target_RT = torch.tensor(filled, device=source_BS.device)
        ends = torch.tensor([len(row) for row in rows], device=source_BS.device)
        total_R = torch.zeros(len(rows), dtype=torch.float64, device=source_BS.device)
        tokens_R = torch.full_like(ends, bos_id)
        for position, wanted_R in enumerate(target_RT.unbind(1)):
            logits_RV = model.step(tokens_R, state)
            dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
            log_probs = torch.log_softmax(logits_RV, dim=1, dtype=dtype)
            log_prob_R = log_probs.gather(1, wanted_R.unsqueeze(1)).squeeze(1)
            total_R += log_prob_R.masked_fill(ends < position, 0)
            tokens_R = wanted_R
    totals = iter(total_R.tolist())
    return [[next(totals) for _ in given] for given in hypotheses]
