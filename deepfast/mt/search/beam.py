"""Beam search over a batch of sentences with cached keys and values, and forced decoding.

A hypothesis Y of log-probability ``log P(Y|X)``, eos included, has the score

    s(Y) = log P(Y|X) / ((5 + |Y|) / 6)^alpha        |Y| tokens, eos included

(Wu et al., Google's Neural Machine Translation System, 2016, Eq. 14, without coverage).
"""

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast.mt.data.vocabulary import BOS, EOS, UNK
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.options import DEFAULTS, DecodingOptions
from deepfast.ops import decoding as ops


@dataclass(frozen=True)
class Hypothesis:
    """One translation."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    score: float
    """Log-probability over length penalty: higher is better."""
    log_prob: float
    """Sum of the natural log-probabilities of the tokens and of eos."""


def length_divisor(length: int, options: DecodingOptions) -> float:
    """What divides the log-probability of a hypothesis of ``length`` tokens, eos included."""
    base = length if options.length_form == "power" else (5 + length) / 6
    return base**options.length_penalty


def beam_search(
    model: SearchModel,
    source_BS: Tensor,
    options: DecodingOptions = DEFAULTS,
    *,
    bos_id: int = BOS,
    eos_id: int = EOS,
    unk_id: int = UNK,
) -> list[list[Hypothesis]]:
    """The best translations of every sentence.

    At every position the ``beam`` best continuations of a sentence's live hypotheses are taken.
    Those that end in eos are set aside, the others live on. A sentence is done, and leaves the
    batch, when no live hypothesis can still come among its ``nbest``: a log-probability only
    falls, so a live hypothesis reaches at most the score that its log P has at the greatest
    length. Stopping then never changes the result. With a beam of 1 the search is greedy.

    Of equal candidates the one from the better hypothesis is taken, then the lower token id.
    Log-probabilities are computed in fp32 (fp64 for an fp64 model) and summed in fp64, also under
    autocast, which the caller chooses. The model is in evaluation mode during the call.

    Args:
        model: see `deepfast.mt.models.interface`.
        source_BS: (B, S) int64 on the model's device, each sentence with its eos, padding
            anywhere.
        options: beam, nbest, length_penalty, length_form, max_length and no_unknown are read. Pad
            and bos are never generated.
        bos_id, eos_id, unk_id: ids of the special tokens; bos and eos may be one.

    Returns:
        For each sentence its hypotheses, best first. There are fewer than ``nbest`` only where the
        vocabulary and ``max_length`` allow no more.

    Raises:
        ValueError: a source of another form, or a sentence without a token.
        RuntimeError: NaN or +inf in the logits, or no token left to generate.
    """
    pad_id = model.config.padding_idx
    lengths = _lengths(source_BS, pad_id)
    sentences = [
        _Sentence(2 * n + 10 if options.max_length is None else options.max_length, options, eos_id)
        for n in lengths
    ]
    if sentences:
        banned = {pad_id, bos_id} | ({unk_id} if options.no_unknown else set())
        with torch.inference_mode(), evaluating(model):
            _search(model, source_BS, sentences, bos_id, sorted(banned - {eos_id}))
    return [sentence.finished for sentence in sentences]


def _lengths(source_BS: Tensor, pad_id: int) -> list[int]:
    """The tokens of each sentence, padding not counted."""
    if not isinstance(source_BS, Tensor) or source_BS.dim() != 2 or source_BS.dtype != torch.int64:
        got = (
            f"{source_BS.dtype} {tuple(source_BS.shape)}"
            if isinstance(source_BS, Tensor)
            else type(source_BS).__name__
        )
        raise ValueError(f"beam_search: source must be int64 (B, S), got {got}")
    lengths = (source_BS != pad_id).sum(1).tolist()
    if 0 in lengths:
        raise ValueError(
            "beam_search: expected at least one token in every sentence, got only padding in "
            f"sentence {lengths.index(0)}"
        )
    return lengths


def _search(
    model: SearchModel,
    source_BS: Tensor,
    sentences: list["_Sentence"],
    bos_id: int,
    banned: list[int],
) -> None:
    """Advances all sentences together, until each is done.

    The rows of the model's batch are the live hypotheses, sentence by sentence. A sentence that is
    done has no row, nor has an empty place in a beam.
    """
    device, eos_id = source_BS.device, sentences[0].eos_id
    beam = sentences[0].options.beam
    state = model.start(source_BS)
    tokens_R = torch.full((len(sentences),), bos_id, device=device)
    active = sentences
    while active:
        logits_RV = model.step(tokens_R, state)
        values_RK, tokens_RK, eos_R = ops.best_tokens(logits_RV, beam, banned, eos_id)
        # NaN or +inf anywhere in a row of logits makes all of its log-probabilities NaN.
        if eos_R.isnan().any():
            raise RuntimeError(
                "beam_search: expected finite logits from the model, got NaN or infinity"
            )
        best = list(zip(values_RK.tolist(), tokens_RK.tolist(), eos_R.tolist(), strict=True))
        parents, chosen, row = [], [], 0
        before, after = [], []
        for index, sentence in enumerate(active):
            rows = len(sentence.live)
            before += [index] * rows
            parents += [row + slot for slot in sentence.advance(best[row : row + rows])]
            chosen += [node[0] for _, node in sentence.live]
            after += [index] * len(sentence.live)
            row += rows
        active = [sentence for sentence in active if sentence.live]
        if active:
            # Reordering copies the cache; greedy search mostly needs no reordering.
            if parents != list(range(row)):
                # A row that stays with its sentence attends to the same encoder output.
                kept = torch.tensor(parents, device=device)
                state.reorder(kept, encoded=before != after)
            tokens_R = torch.tensor(chosen, device=device)


_Next = tuple[list[float], list[int], float]
"""The best next tokens of a hypothesis: their log P, these tokens, and the log P of eos."""
_Node = tuple[int, "_Node | None"]
"""The last token of a hypothesis and the hypothesis before it."""


def _path(node: _Node | None) -> tuple[int, ...]:
    tokens = []
    while node is not None:
        token, node = node
        tokens.append(token)
    return tuple(reversed(tokens))


class _Sentence:
    """The search of one sentence."""

    def __init__(self, limit: int, options: DecodingOptions, eos_id: int):
        """limit: most tokens of a hypothesis, eos not counted."""
        self.limit, self.options, self.eos_id = limit, options, eos_id
        self.length = 0
        """Tokens of every live hypothesis."""
        self.live: list[tuple[float, _Node | None]] = [(0.0, None)]
        """(log P, last node), best first."""
        self.finished: list[Hypothesis] = []
        """Best first, at most nbest."""

    def advance(self, best: list[_Next]) -> list[int]:
        """Moves on by one position, from the best next tokens of each live hypothesis.

        Returns:
            For each hypothesis live now the place of the one it continues.
        """
        old, eos_id = self.live, self.eos_id
        if self.length == self.limit:
            # Only eos may come next.
            best = [([eos], [eos_id], eos) for _, _, eos in best]
        continuations = [
            (before + value, slot, token)
            for slot, ((before, _), (values, tokens, _)) in enumerate(zip(old, best, strict=True))
            for value, token in zip(values, tokens, strict=True)
        ]
        # Of equal ones that of the better hypothesis stays first, then the lower token.
        continuations.sort(key=operator.itemgetter(0), reverse=True)
        continuations = [c for c in continuations[: self.options.beam] if c[0] > -math.inf]
        self.length += 1
        for log_prob, slot, token in continuations:
            if token == eos_id:
                self._finish(log_prob, old[slot][1])
        self.live = [
            (log_prob, (token, old[slot][1]))
            for log_prob, slot, token in continuations
            if token != eos_id
        ]
        slots = [slot for _, slot, token in continuations if token != eos_id]
        if self._done():
            self.live, slots = [], []
        if not self.live and not self.finished:
            raise RuntimeError(
                f"beam_search: expected a token that may be generated at position {self.length}, "
                f"got probability 0 for all of them"
            )
        return slots

    def _finish(self, log_prob: float, node: _Node | None) -> None:
        nbest = self.options.nbest
        score = log_prob / length_divisor(self.length, self.options)
        place = len(self.finished)
        while place and self.finished[place - 1].score < score:
            place -= 1
        if place < nbest:
            self.finished.insert(place, Hypothesis(_path(node), score, log_prob))
            del self.finished[nbest:]

    def _done(self) -> bool:
        """Whether no live hypothesis can still come among the finished ones."""
        if not self.live or len(self.finished) < self.options.nbest:
            return not self.live
        # log P <= 0 only falls and, for alpha >= 0, the longest hypothesis divides it by most.
        best = self.live[0][0] / length_divisor(self.limit + 1, self.options)
        return best <= self.finished[-1].score


@contextlib.contextmanager
def evaluating(model: SearchModel) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode in which it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
