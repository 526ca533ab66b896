"""Beam search over a batch of sentences, and the log-probabilities of given translations.

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

from deepfast.dtypes import compute_dtype
from deepfast.mt.data import make_batch
from deepfast.mt.ids import BOS, EOS, PAD, UNK
from deepfast.mt.models.interface import SearchModel, TranslationModel, target_vocab_size
from deepfast.mt.search.options import DEFAULTS, DecodingOptions
from deepfast.ops import decoding as ops

AT_ONCE = 1024
"""Positions whose logits are in memory at a time, where translations are scored."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    score: float
    """Log-probability over length penalty: higher is better."""
    log_prob: float
    """Sum of the natural log-probabilities of the tokens and of eos."""


def beam_search(
    model: SearchModel, source_BS: Tensor, options: DecodingOptions = DEFAULTS
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

    Returns:
        For each sentence its hypotheses, best first. There are fewer than ``nbest`` only where the
        vocabulary and ``max_length`` allow no more.

    Raises:
        RuntimeError: NaN or +inf in the logits, or no token left to generate.
    """
    lengths = (source_BS != PAD).sum(1).tolist()
    sentences = [_Sentence(options.max_length or 2 * n + 10, options) for n in lengths]
    if sentences:
        with torch.inference_mode(), evaluating(model):
            _search(model, source_BS, sentences, options)
    return [sentence.finished for sentence in sentences]


def _search(
    model: SearchModel, source_BS: Tensor, active: list["_Sentence"], options: DecodingOptions
) -> None:
    """Advances all sentences together, until each is done.

    The rows of the model's batch are the live hypotheses, sentence by sentence. A sentence that is
    done has no row, nor has an empty place in a beam.
    """
    device = source_BS.device
    banned = sorted({PAD, BOS, *([UNK] if options.no_unknown else [])})
    state = model.start(source_BS)
    tokens_R = torch.full((len(active),), BOS, device=device)
    while active:
        logits_RV = model.step(tokens_R, state)
        values_RK, tokens_RK, eos_R = ops.best_tokens(logits_RV, options.beam, banned, EOS)
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
            chosen += [tokens[-1] for _, tokens in sentence.live]
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


class _Sentence:
    """The search of one sentence."""

    def __init__(self, limit: int, options: DecodingOptions):
        """limit: most tokens of a hypothesis, eos not counted."""
        self.limit, self.options = limit, options
        self.length = 0
        """Tokens of every live hypothesis."""
        self.live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        """(log P, tokens), best first."""
        self.finished: list[Hypothesis] = []
        """Best first, at most nbest."""

    def advance(self, best: list[tuple[list[float], list[int], float]]) -> list[int]:
        """Moves on by one position.

        Args:
            best: for each live hypothesis the log P of its best next tokens, these tokens, and the
                log P of eos.

        Returns:
            For each hypothesis that lives on the place of the one it continues.
        """
        old, options = self.live, self.options
        if self.length == self.limit:
            # Only eos may come next.
            best = [([eos], [EOS], eos) for _, _, eos in best]
        continuations = [
            (before + value, slot, token)
            for slot, ((before, _), (values, tokens, _)) in enumerate(zip(old, best, strict=True))
            for value, token in zip(values, tokens, strict=True)
        ]
        # Of equal ones that of the better hypothesis stays first, then the lower token.
        continuations.sort(key=operator.itemgetter(0), reverse=True)
        continuations = [c for c in continuations[: options.beam] if c[0] > -math.inf]
        self.length += 1
        self.live, slots = [], []
        for log_prob, slot, token in continuations:
            tokens = old[slot][1]
            if token == EOS:
                score = log_prob / self._divisor(self.length)
                self.finished.append(Hypothesis(tokens, score, log_prob))
            else:
                self.live.append((log_prob, (*tokens, token)))
                slots.append(slot)
        self.finished.sort(key=operator.attrgetter("score"), reverse=True)
        del self.finished[options.nbest :]
        if self.live and len(self.finished) == options.nbest:
            # log P <= 0 only falls and, for alpha >= 0, the longest hypothesis divides it by most.
            reached = self.live[0][0] / self._divisor(self.limit + 1)
            if reached <= self.finished[-1].score:
                self.live, slots = [], []
        if not self.live and not self.finished:
            raise RuntimeError(
                f"beam_search: expected a token that may be generated at position {self.length}, "
                f"got probability 0 for all of them"
            )
        return slots

    def _divisor(self, length: int) -> float:
        """The divisor of the log-probability of ``length`` tokens, eos included."""
        base = length if self.options.length_form == "power" else (5 + length) / 6
        return base**self.options.length_penalty


@contextlib.contextmanager
def evaluating(model: SearchModel) -> Iterator[None]:
    """Evaluation mode; afterwards the model is in the mode in which it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def score_hypotheses(
    model: TranslationModel, source_BS: Tensor, hypotheses: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Log-probabilities ``log P(Y|X)`` of given translations, natural, eos included.

    One forward pass of the model gives the quantity of `Hypothesis.log_prob` for any translation.

    Args:
        model: in evaluation mode for the call.
        source_BS: (B, S) int64 on the model's device, each sentence with its eos.
        hypotheses: for each sentence any number of translations, token ids without bos and eos.

    Returns:
        For each sentence the log-probability of each of its translations, summed in fp64.
    """
    rows = [(sentence, tokens) for sentence, given in enumerate(hypotheses) for tokens in given]
    if not rows:
        return [[] for _ in hypotheses]
    size, device = target_vocab_size(model.config), source_BS.device
    sentences, targets = zip(*rows, strict=True)
    batch = make_batch([((), tokens) for tokens in targets], range(len(rows))).to(device)
    # A label names its row too, because each model orders the positions in its own way.
    labels_RT = batch.target_out_BT + size * torch.arange(len(rows), device=device).unsqueeze(1)
    source_RS = source_BS[torch.tensor(sentences, device=device)]
    total_R = torch.zeros(len(rows), dtype=torch.float64, device=device)
    with torch.inference_mode(), evaluating(model):
        hidden, labels = model.labelled(source_RS, batch.target_in_BT, labels_RT)
        for x, label in zip(hidden.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
            logits = model.project(x)
            log_probs = torch.log_softmax(logits, dim=1, dtype=compute_dtype(logits.dtype))
            chosen = log_probs.gather(1, (label % size).unsqueeze(1)).squeeze(1)
            total_R.index_add_(0, label // size, chosen.double())
    totals = iter(total_R.tolist())
    return [[next(totals) for _ in given] for given in hypotheses]
