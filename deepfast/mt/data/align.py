"""Word alignment learned from a parallel text: IBM model 1 in both directions, intersected.

Brown et al., The Mathematics of Statistical Machine Translation, 1993. Model 1 has a table of
translation probabilities and no word order: with the words s of a sentence's source,

    P(t_j comes from s_i) = p(t_j | s_i) / sum_i' p(t_j | s_i')

and EM sets p(t | s) to the share of t among what s is expected to produce. The paper's empty source
word is left out. A link is kept where each word is the likeliest for the other, in the model of its
direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Words = Sequence[str]
Links = list[tuple[int, int]]
"""Positions (i, j) of linked source and target words; each j at most once, in rising order."""

AT_ONCE = 1 << 22
"""Pairs of words that are processed at a time."""
ROUNDS = 5
"""Rounds of EM."""
TIE = 1e-6
"""The share of its probability that a link loses if it goes from one end of a sentence to the
other end of its translation. It decides between equal words of a sentence."""


class _Entries(NamedTuple):
    """Every source word with every target word of its sentence pair, for some sentence pairs. Each
    field is (E,)."""

    key: Tensor
    """Which two words these are: source * targets + target."""
    source: Tensor
    target: Tensor
    """The places of the two words in all source and all target words of these sentence pairs."""
    i: Tensor
    j: Tensor
    """Their positions in their sentences."""
    sentence: Tensor
    """The number of the sentence pair among these."""
    near: Tensor
    """1 on the sentence's diagonal, `TIE` less at the corners."""


class Aligner:
    """Aligns the words of sentence pairs.

    Args:
        pairs: the words of both sides of each sentence pair, to learn from. Memory is about 60
            bytes for each different pair of words that share a sentence pair.
        rounds: of EM.
    """

    def __init__(self, pairs: Sequence[tuple[Words, Words]], rounds: int = ROUNDS):
        self._ids: tuple[dict[str, int], dict[str, int]] = {}, {}
        for pair in pairs:
            for ids, words in zip(self._ids, pair, strict=True):
                for word in words:
                    ids.setdefault(word, len(ids))
        # One more: words that were not in the text have the last number.
        self._targets = len(self._ids[1]) + 1
        self._keys = self._different(pairs)
        """The pairs of words, as source * targets + target, in rising order."""
        source, target = self._keys // self._targets, self._keys % self._targets
        # p(t | s) and p(s | t); before the first round all words are equally likely.
        self._forward = self._backward = torch.ones(len(self._keys), dtype=torch.float64)
        for _ in range(rounds):
            counts = torch.zeros(2, len(self._keys), dtype=torch.float64)
            for _, entries in self._chunks(pairs):
                at = torch.searchsorted(self._keys, entries.key)
                for count, share in zip(counts, self._shares(entries, at), strict=True):
                    count.index_add_(0, at, share)
            self._forward = _normalised(counts[0], source)
            self._backward = _normalised(counts[1], target)

    def _numbers(self, side: int, sentences: Sequence[Words]) -> Tensor:
        ids = self._ids[side]
        numbers = [ids.get(word, len(ids)) for words in sentences for word in words]
        return torch.tensor(numbers, dtype=torch.int64)

    def _different(self, pairs: Sequence[tuple[Words, Words]]) -> Tensor:
        """The keys of all entries, each once, in rising order."""
        found = torch.zeros(0, dtype=torch.int64)
        new: list[Tensor] = []
        for _, entries in self._chunks(pairs):
            new.append(torch.unique(entries.key))
            # Not after each chunk, which would take quadratic time, and not all at the end: most
            # keys come in many chunks.
            if sum(map(len, new)) > max(len(found), AT_ONCE):
                found, new = torch.unique(torch.cat([found, *new])), []
        return torch.unique(torch.cat([found, *new]))

    def _chunks(self, pairs: Sequence[tuple[Words, Words]]) -> Iterator[tuple[int, _Entries]]:
        """The number of the first sentence pair, and the entries, of as many as fit."""
        first = 0
        while first < len(pairs):
            last, size = first, 0
            while last < len(pairs) and (last == first or size < AT_ONCE):
                size += len(pairs[last][0]) * len(pairs[last][1])
                last += 1
            yield first, self._entries(pairs[first:last])
            first = last

    def _entries(self, pairs: Sequence[tuple[Words, Words]]) -> _Entries:
        lengths = [torch.tensor([len(pair[side]) for pair in pairs]) for side in (0, 1)]
        begins = [length.cumsum(0) - length for length in lengths]
        counts = lengths[0] * lengths[1]
        sentence = torch.repeat_interleave(torch.arange(len(pairs)), counts)
        within = torch.arange(len(sentence)) - (counts.cumsum(0) - counts)[sentence]
        across = lengths[1][sentence]
        i, j = within // across, within % across
        source, target = begins[0][sentence] + i, begins[1][sentence] + j
        words = [self._numbers(side, [pair[side] for pair in pairs]) for side in (0, 1)]
        key = words[0][source] * self._targets + words[1][target]
        off = i.double() / lengths[0][sentence] - j.double() / across
        return _Entries(key, source, target, i, j, sentence, 1 - TIE * off.abs())

    def _shares(self, entries: _Entries, at: Tensor) -> tuple[Tensor, Tensor]:
        """Each entry's share of its target word, and of its source word."""
        found = []
        for table, word in ((self._forward, entries.target), (self._backward, entries.source)):
            weight = table[at]
            found.append(weight / _sums(weight, word)[word])
        return found[0], found[1]

    def links(self, pairs: Sequence[tuple[Words, Words]]) -> list[Links]:
        """The links of each sentence pair. Words that were not in the text have none."""
        links: list[Links] = [[] for _ in pairs]
        for first, entries in self._chunks(pairs):
            if not len(entries.key) or not len(self._keys):
                continue
            at = torch.searchsorted(self._keys, entries.key).clamp(max=len(self._keys) - 1)
            known = self._keys[at] == entries.key
            chosen = known
            for table, word in ((self._forward, entries.target), (self._backward, entries.source)):
                weight = torch.where(known, table[at] * entries.near, 0.0)
                most = weight.new_zeros(int(word.max()) + 1)
                most.scatter_reduce_(0, word, weight, "amax")
                chosen = chosen & (weight == most[word])
            rows = torch.stack((entries.sentence, entries.j, entries.i))[:, chosen].T.tolist()
            for sentence, j, i in sorted(rows):
                own = links[first + sentence]
                if not own or own[-1][1] != j:
                    own.append((i, j))
        return links


def _sums(weight: Tensor, group: Tensor) -> Tensor:
    """The sum of each group's weights."""
    count = int(group.max()) + 1 if len(group) else 0
    return weight.new_zeros(count).index_add_(0, group, weight)


def _normalised(counts: Tensor, group: Tensor) -> Tensor:
    """Counts as shares of their group."""
    return counts / _sums(counts, group)[group]
