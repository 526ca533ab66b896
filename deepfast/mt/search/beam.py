"""Beam search over a batch of sentences, with cached keys and values.

A hypothesis Y of log-probability ``log P(Y|X)``, eos included, has the score

    s(Y) = log P(Y|X) / ((5 + |Y|) / 6)^alpha        |Y| tokens, eos included

(Wu et al., Google's Neural Machine Translation System, 2016, Eq. 14, without coverage).
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepfast.mt.data.vocabulary import BOS, EOS, UNK
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.options import DEFAULTS, DecodingOptions


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
        values, tokens, eos = _best_tokens(logits_RV, beam, banned, eos_id)
        parents, chosen, row = [], [], 0
        before, after = [], []
        for index, sentence in enumerate(active):
            before += [index] * len(sentence.live)
            end = row + len(sentence.live)
            slots = sentence.advance(values[row:end], tokens[row:end], eos[row:end])
            parents += [row + slot for slot in slots]
            chosen += [node.token for _, node in sentence.live]
            after += [index] * len(sentence.live)
            row = end
        active = [sentence for sentence in active if sentence.live]
        if active:
            # Reordering copies the cache; greedy search mostly needs no reordering.
            if parents != list(range(row)):
                # A row that stays with its sentence attends to the same encoder output.
                kept = torch.tensor(parents, device=device)
                state.reorder(kept, encoded=before != after)
            tokens_R = torch.tensor(chosen, device=device)


@dataclass(frozen=True, eq=False)
class _Node:
    """The last token of a hypothesis and the hypothesis before it."""

    token: int
    before: "_Node | None"

    def path(self) -> tuple[int, ...]:
        tokens, node = [], self
        while node is not None:
            tokens.append(node.token)
            node = node.before
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

    def advance(
        self, values: list[list[float]], tokens: list[list[int]], eos: list[float]
    ) -> list[int]:
        """Takes the best continuations.

        Args:
            values, tokens: for each live hypothesis its best next tokens and their log P.
            eos: for each live hypothesis the log P of eos.

        Returns:
            For each hypothesis live now the place of the one it continues.
        """
        if self.length == self.limit:
            values, tokens = [[value] for value in eos], [[self.eos_id]] * len(eos)
        # Equal candidates stay in order of hypothesis, then of token id.
        candidates = [
            (-(before + value), slot, place)
            for slot, ((before, _), row) in enumerate(zip(self.live, values, strict=True))
            for place, value in enumerate(row)
            if value > -math.inf
        ]
        candidates.sort()
        self.length += 1
        live, slots = [], []
        for negated, slot, place in candidates[: self.options.beam]:
            log_prob, token, before = -negated, tokens[slot][place], self.live[slot][1]
            if token == self.eos_id:
                self._finish(log_prob, before)
            else:
                live.append((log_prob, _Node(token, before)))
                slots.append(slot)
        self.live = live
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
            path = () if node is None else node.path()
            self.finished.insert(place, Hypothesis(path, score, log_prob))
            del self.finished[nbest:]

    def _done(self) -> bool:
        """Whether no live hypothesis can still come among the finished ones."""
        if not self.live or len(self.finished) < self.options.nbest:
            return not self.live
        # log P <= 0 only falls and, for alpha >= 0, the longest hypothesis divides it by most.
        best = self.live[0][0] / length_divisor(self.limit + 1, self.options)
        return best <= self.finished[-1].score


def _best_tokens(
    logits_RV: Tensor, count: int, banned: list[int], eos_id: int
) -> tuple[list[list[float]], list[list[int]], list[float]]:
    """The ``count`` most probable tokens of every row, best first, equal ones by id.

    Returns:
        Their log P and ids, (R, count) each, and the log P of eos, (R,). A banned token has -inf.
    """
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    log_probs = torch.log_softmax(logits_RV, dim=1, dtype=dtype)
    eos = log_probs[:, eos_id].tolist()
    # NaN or +inf anywhere in a row makes all of its log-probabilities NaN.
    if any(map(math.isnan, eos)):
        raise RuntimeError(
            "beam_search: expected finite logits from the model, got NaN or infinity"
        )
    for token in banned:
        log_probs[:, token] = -math.inf
    count = min(count, log_probs.shape[1])
    # One more than needed shows whether the cut runs through equal values.
    values, tokens = _topk(log_probs, min(count + 1, log_probs.shape[1]))
    tokens, order = tokens.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    if values.shape[1] > count:
        last = values[:, count - 1]
        tied = ((last == values[:, count]) & (last > -math.inf)).nonzero().squeeze(1)
        if tied.numel():
            tokens[tied, :count] = _lowest_ids(
                log_probs[tied], values[tied, :count], tokens[tied, :count]
            )
    return values[:, :count].tolist(), tokens[:, :count].tolist(), eos


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
