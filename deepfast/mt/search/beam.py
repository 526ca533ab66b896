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
from torch import Tensor, nn

from deepfast.mt.data.vocabulary import BOS, EOS, UNK


@dataclass(frozen=True)
class Hypothesis:
    """One translation."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    score: float
    """Log-probability over length penalty: higher is better."""
    log_prob: float
    """Sum of the natural log-probabilities of the tokens and of eos."""


def length_divisor(length: int, alpha: float) -> float:
    """``((5 + length) / 6)^alpha`` (Wu et al. 2016)."""
    return ((5 + length) / 6) ** alpha


def beam_search(
    model: nn.Module,
    source_BS: Tensor,
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    nbest: int = 1,
    suppress_unknown: bool = False,
    bos_id: int = BOS,
    eos_id: int = EOS,
    unk_id: int = UNK,
) -> list[list[Hypothesis]]:
    """The best translations of every sentence.

    At every position the ``beam`` best continuations of a sentence's live hypotheses are taken.
    Those that end in eos are set aside, the others live on. A sentence is done, and leaves the
    batch, when no live hypothesis can still come among its ``nbest``: a log-probability only
    falls, so a live hypothesis reaches at most ``log P / ((5 + longest) / 6)^alpha``. This never
    changes the result. With ``beam=1`` the search is greedy.

    Of equal candidates the one from the better hypothesis is taken, then the lower token id.
    Log-probabilities are made in fp32 (fp64 for an fp64 model) and summed in fp64, also under
    autocast, which is the caller's choice. The model is in evaluation mode for the call.

    Args:
        model: see `deepfast.mt.models.interface`.
        source_BS: (B, S) int64 on the model's device, each sentence with its eos, padding
            anywhere.
        beam: hypotheses kept per sentence; more than the vocabulary holds is no error.
        length_penalty: alpha >= 0; 0 is none. 0.6 as in Wang et al. 2019 (DLCL).
        max_length: most tokens of a hypothesis, eos not counted; then eos is forced and its
            log-probability counts. None: ``2 * n + 10`` for a source of n tokens, eos included.
        nbest: hypotheses returned per sentence, at most ``beam``.
        suppress_unknown: whether unk may not be generated; pad and bos never are.
        bos_id, eos_id, unk_id: ids of the special tokens; bos and eos may be one.

    Returns:
        For each sentence its hypotheses, best first; fewer than ``nbest`` only where the
        vocabulary and ``max_length`` allow no more.

    Raises:
        ValueError: an argument out of range, or a sentence without a token.
        RuntimeError: NaN or +inf in the logits, or no token left to generate.
    """
    _check(source_BS, beam, length_penalty, max_length, nbest)
    pad_id = model.config.padding_idx
    lengths = (source_BS != pad_id).sum(1).tolist()
    if 0 in lengths:
        raise ValueError(
            f"beam_search: expected at least one token in every sentence, got only padding in "
            f"sentence {lengths.index(0)}"
        )
    sentences = [
        _Sentence(
            limit=2 * n + 10 if max_length is None else max_length,
            beam=beam,
            alpha=length_penalty,
            nbest=nbest,
            eos_id=eos_id,
        )
        for n in lengths
    ]
    if sentences:
        banned = {pad_id, bos_id} | ({unk_id} if suppress_unknown else set())
        with torch.inference_mode(), evaluating(model):
            _search(model, source_BS, sentences, bos_id, sorted(banned - {eos_id}))
    return [sentence.finished for sentence in sentences]


def _search(
    model: nn.Module,
    source_BS: Tensor,
    sentences: list["_Sentence"],
    bos_id: int,
    banned: list[int],
) -> None:
    """Advances all sentences together, until each is done.

    The rows of the model's batch are the live hypotheses, sentence by sentence: there is no row
    for a sentence that is done or for an empty place in a beam.
    """
    device, beam, eos_id = source_BS.device, sentences[0].beam, sentences[0].eos_id
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
            # Moving the cache is memory traffic; greedy search mostly needs none.
            if parents != list(range(row)):
                # Rows that stay on their sentences attend to the same encoder output.
                index = torch.tensor(parents, device=device)
                state.reorder(index, memory=before != after)
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

    def __init__(self, *, limit: int, beam: int, alpha: float, nbest: int, eos_id: int):
        self.limit, self.beam, self.alpha = limit, beam, alpha
        self.nbest, self.eos_id = nbest, eos_id
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
        candidates = [
            (self.live[slot][0] + value, slot, token)
            for slot in range(len(self.live))
            for value, token in zip(values[slot], tokens[slot], strict=True)
            if value > -math.inf
        ]
        # The sort is stable: equal candidates stay in order of hypothesis, then of token id.
        candidates.sort(key=lambda candidate: -candidate[0])
        self.length += 1
        live, slots = [], []
        for log_prob, slot, token in candidates[: self.beam]:
            before = self.live[slot][1]
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
        score = log_prob / length_divisor(self.length, self.alpha)
        place = len(self.finished)
        while place and self.finished[place - 1].score < score:
            place -= 1
        if place < self.nbest:
            path = () if node is None else node.path()
            self.finished.insert(place, Hypothesis(path, score, log_prob))
            del self.finished[self.nbest :]

    def _done(self) -> bool:
        """Whether no live hypothesis can still come among the finished ones."""
        if not self.live or len(self.finished) < self.nbest:
            return not self.live
        # log P <= 0 only falls and, for alpha >= 0, the longest hypothesis divides it by most.
        best = self.live[0][0] / length_divisor(self.limit + 1, self.alpha)
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
    log_probs[:, banned] = -math.inf
    count = min(count, log_probs.shape[1])
    # One more than needed shows whether the cut runs through equal values.
    values, tokens = log_probs.topk(min(count + 1, log_probs.shape[1]))
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


def _lowest_ids(log_probs: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (R, K) where of all that equal the last value those of lowest id are taken.

    `topk` takes any of them, and bf16 logits make such ties common.
    """
    size, count = log_probs.shape[1], values.shape[1]
    ids = torch.arange(size, device=tokens.device)
    equal = torch.where(log_probs == values[:, -1:], ids, size)
    equal = equal.topk(count, largest=False, sorted=True).values
    place = torch.arange(count, device=tokens.device)
    place = place - (values > values[:, -1:]).sum(1, keepdim=True)
    return torch.where(place >= 0, equal.gather(1, place.clamp(min=0)), tokens)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is as it was, also where they differed."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(source_BS, beam, length_penalty, max_length, nbest) -> None:
    if not isinstance(source_BS, Tensor) or source_BS.dim() != 2 or source_BS.dtype != torch.int64:
        got = (
            f"{source_BS.dtype} {tuple(source_BS.shape)}"
            if isinstance(source_BS, Tensor)
            else type(source_BS).__name__
        )
        raise ValueError(f"beam_search: source must be int64 (B, S), got {got}")
    for name, value in (("beam", beam), ("nbest", nbest), ("max_length", max_length)):
        if value is None and name == "max_length":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"beam_search: {name} must be a whole number of at least 1, got {value!r}"
            )
    if nbest > beam:
        raise ValueError(f"beam_search: nbest must be at most beam {beam}, got {nbest}")
    # Below 0 a longer hypothesis could not be bounded, and not(...) refuses NaN too.
    if not 0 <= length_penalty < math.inf:
        raise ValueError(
            f"beam_search: length_penalty must be a number of at least 0, got {length_penalty}"
        )
