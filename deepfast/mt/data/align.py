"""Word alignment learned from a parallel text: IBM model 1 in both directions, intersected.

Brown et al., The Mathematics of Statistical Machine Translation, 1993. Model 1 has a table of
translation probabilities and no word order: with the words s of a sentence's source,

    P(t_j comes from s_i) = p(t_j | s_i) / sum_i' p(t_j | s_i')

and EM sets p(t | s) to the share of t among what s is expected to produce. The paper's empty source
word is left out. A link is kept where each word is the likeliest for the other, in the model of its
direction.

The text is read as a stream. Its words are numbers in temporary files, and the table has an entry
for each two words that share a sentence pair. A text with more than `MOST` word pairs gets fewer
entries: with the least k for which about `MOST` entries are left, two words have one where they
meet at least k times, or at least in half of the places of the more frequent one.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepfast.mt.data.pairs import AT_ONCE, Sentences, SentenceWriter

Words = Sequence[str]
WordPair = tuple[Words, Words]
Links = list[tuple[int, int]]
"""Positions (i, j) of linked source and target words; each j at most once, in rising order."""

ENTRIES_AT_ONCE = 1 << 22
"""Pairs of words that are processed at a time."""
MOST = 50_000_000
"""Entries of the table, about 40 bytes each."""
SLOTS = 30
"""Two words meet in one of 2^30 slots, a byte each, by which their meetings are counted."""
ROUNDS = 5
"""Rounds of EM."""
TIE = 1e-6
"""The share of its probability that a link loses if it goes from one end of a sentence to the
other end of its translation. It decides between equal words of a sentence."""


class _Entries(NamedTuple):
    """Every source word with every target word of its sentence pair, for some sentence pairs. Each
    field is (E,)."""

    key: np.ndarray
    """The two words as one number: source * targets + target."""
    source: np.ndarray
    target: np.ndarray
    """The places of the two words in all source and all target words of these sentence pairs."""
    i: np.ndarray
    j: np.ndarray
    """Their positions in their sentences."""
    sentence: np.ndarray
    """The number of the sentence pair among these."""
    near: np.ndarray
    """1 on the sentence's diagonal, `TIE` less at the corners."""


class Aligner:
    """Aligns the words of sentence pairs.

    Args:
        text: the words of both sides of each sentence pair, to learn from; it is read once.
        rounds: of EM.
        say: called with a line before each pass over the text.
    """

    def __init__(
        self,
        text: Iterable[WordPair],
        rounds: int = ROUNDS,
        say: Callable[[str], object] = lambda line: None,
    ):
        self._words: tuple[dict[str, int], dict[str, int]] = {}, {}
        with tempfile.TemporaryDirectory(prefix="deepfast-align-") as folder:
            pairs = self._numbered(text, Path(folder))
            # One more: words that were not in the text have the last number.
            self._targets = len(self._words[1]) + 1
            self.target_counts = np.bincount(pairs[1].ids, minlength=self._targets)
            """How often each target word occurs."""
            say(f"{len(self._words[0]):,} source and {len(self._words[1]):,} target words")
            self._keys = self._table(pairs, say)
            """The entries of the table as source * targets + target, in rising order."""
            # p(t | s) and p(s | t); before the first round all words are equally likely.
            self._forward = self._backward = np.ones(len(self._keys))
            for number in range(1, rounds + 1):
                say(f"round {number} of {rounds}, {len(self._keys):,} pairs of words")
                self._forward, self._backward = self._round(pairs)
            # The files cannot be removed from a folder while they are mapped, on some systems.
            del pairs

    def _numbered(self, text: Iterable[WordPair], folder: Path) -> tuple[Sentences, Sentences]:
        """The text as numbers of words, in the order in which they first occur."""
        writers = [SentenceWriter(folder, name, "int32") for name in ("source", "target")]
        rows = iter(text)
        while block := list(itertools.islice(rows, AT_ONCE)):
            for side, (writer, ids) in enumerate(zip(writers, self._words, strict=True)):
                writer.add([[ids.setdefault(w, len(ids)) for w in pair[side]] for pair in block])
        source, target = (writer.close() for writer in writers)
        return source, target

    def _table(
        self, pairs: tuple[Sentences, Sentences], say: Callable[[str], object]
    ) -> np.ndarray:
        """The keys of the entries that the table keeps, each once, in rising order."""
        total = int((pairs[0].lengths.astype(np.int64) * pairs[1].lengths).sum())
        keep: Callable[[np.ndarray], np.ndarray] = lambda keys: keys  # noqa: E731
        if total > MOST:
            say(f"counting {total:,} meetings of two words")
            keep = self._often(pairs)
        found = np.zeros(0, np.int64)
        waiting: list[np.ndarray] = []
        say("collecting pairs of words")
        for _, entries in _chunks(*pairs, self._targets):
            waiting.append(keep(np.unique(entries.key)))
            # Not after each chunk, which would take quadratic time, and not all at the end: most
            # keys come in many chunks.
            if sum(map(len, waiting)) > max(len(found), ENTRIES_AT_ONCE):
                found, waiting = np.unique(np.concatenate([found, *waiting])), []
        return np.unique(np.concatenate([found, *waiting]))

    def _often(self, pairs: tuple[Sentences, Sentences]) -> Callable[[np.ndarray], np.ndarray]:
        """Keeps, of different keys, those that occur often enough, see above. Two words that share
        a slot with others may be kept too."""
        counts = np.zeros(1 << SLOTS, np.uint8)
        for _, entries in _chunks(*pairs, self._targets):
            slots, times = np.unique(_slot(entries.key), return_counts=True)
            counts[slots] = np.minimum(counts[slots] + times, 255)
        histogram = np.zeros(257, np.int64)
        # In parts, because numpy makes them 8 bytes a number.
        for part in np.array_split(counts, 1 << 10):
            histogram += np.bincount(part, minlength=257)
        at_least = histogram[::-1].cumsum()[::-1]
        least = int(np.argmax(at_least[1:] <= MOST)) + 1
        source_counts = np.bincount(pairs[0].ids, minlength=len(self._words[0]))

        def keep(keys: np.ndarray) -> np.ndarray:
            source, target = np.divmod(keys, self._targets)
            places = np.maximum(source_counts[source], self.target_counts[target])
            return keys[counts[_slot(keys)] >= np.minimum(least, (places + 1) // 2)]

        return keep

    def _round(self, pairs: tuple[Sentences, Sentences]) -> tuple[np.ndarray, np.ndarray]:
        """A round of EM: p(t | s) and p(s | t) of every entry."""
        counts = np.zeros((2, len(self._keys)))
        for _, entries in _chunks(*pairs, self._targets):
            at, known, inverse = self._find(entries.key)
            weights = self._weights(at, known, inverse)
            words = entries.target, entries.source
            for count, weight, word in zip(counts, weights, words, strict=True):
                norm = np.bincount(word, weight)[word]
                share = np.divide(weight, norm, out=np.zeros_like(weight), where=norm > 0)
                sums = np.bincount(inverse, share, len(at))
                count[at[known]] += sums[known]
        groups = self._keys // self._targets, self._keys % self._targets
        shares = [
            count / np.bincount(group, count)[group]
            for count, group in zip(counts, groups, strict=True)
        ]
        return shares[0], shares[1]

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For the different ones of ``keys`` their places in the table and whether they are there;
        and for each key its number among these."""
        different, inverse = np.unique(keys, return_inverse=True)
        # A word that was not in the text is after all of them.
        at = np.searchsorted(self._keys, different).clip(max=max(len(self._keys) - 1, 0))
        known = self._keys[at] == different if len(self._keys) else np.zeros(len(at), bool)
        return at, known, inverse

    def _weights(
        self, at: np.ndarray, known: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """p(t | s) and p(s | t) of the keys of `_find`; 0 where the table has no entry."""
        if not len(self._keys):
            return np.zeros(len(inverse)), np.zeros(len(inverse))
        tables = self._forward, self._backward
        forward, backward = (np.where(known, table[at], 0.0)[inverse] for table in tables)
        return forward, backward

    def links(self, text: Iterable[WordPair]) -> Iterator[Links]:
        """The links of each sentence pair. Words that were not in the text have none."""
        rows = iter(text)
        while block := list(itertools.islice(rows, AT_ONCE)):
            links: list[Links] = [[] for _ in block]
            sides = [
                Sentences.of([[ids.get(word, len(ids)) for word in pair[side]] for pair in block])
                for side, ids in enumerate(self._words)
            ]
            for first, entries in _chunks(sides[0], sides[1], self._targets):
                for sentence, j, i in self._linked(entries):
                    own = links[first + sentence]
                    if not own or own[-1][1] != j:
                        own.append((i, j))
            yield from links

    def _linked(self, entries: _Entries) -> list[list[int]]:
        """(sentence, j, i) of the entries where each word is the likeliest for the other."""
        at, known, inverse = self._find(entries.key)
        chosen = known[inverse]
        words = entries.target, entries.source
        for weight, word in zip(self._weights(at, known, inverse), words, strict=True):
            near = weight * entries.near
            most = np.zeros(int(word.max(initial=-1)) + 1)
            np.maximum.at(most, word, near)
            chosen = chosen & (near == most[word])
        rows = np.stack((entries.sentence, entries.j, entries.i), 1)[chosen]
        return sorted(rows.tolist())

    def most_frequent(self, count: int) -> set[str]:
        """The ``count`` most frequent target words; of equally frequent ones those that come
        first."""
        order = np.argsort(-self.target_counts[:-1], kind="stable")[:count]
        words = list(self._words[1])
        return {words[number] for number in order}


def _slot(keys: np.ndarray) -> np.ndarray:
    # Multiplication by 2^64 / the golden ratio spreads the keys, Knuth 1973, section 6.4.
    return (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS)


def _chunks(source: Sentences, target: Sentences, targets: int) -> Iterator[tuple[int, _Entries]]:
    """The number of the first sentence pair, and the entries, of as many as fit."""
    lengths = source.lengths.astype(np.int64), target.lengths.astype(np.int64)
    ends = (lengths[0] * lengths[1]).cumsum()
    first = 0
    while first < len(ends):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + ENTRIES_AT_ONCE, "right")), first + 1)
        yield first, _entries(source.part(first, last), target.part(first, last), targets)
        first = last


def _entries(source: Sentences, target: Sentences, targets: int) -> _Entries:
    down, across = source.lengths.astype(np.int64), target.lengths.astype(np.int64)
    counts = down * across
    sentence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sentence)) - (counts.cumsum() - counts)[sentence]
    i, j = np.divmod(within, across[sentence])
    left, right = source.starts[sentence] + i, target.starts[sentence] + j
    key = source.ids[left].astype(np.int64) * targets + target.ids[right]
    off = i / down[sentence] - j / across[sentence]
    return _Entries(key, left, right, i, j, sentence, 1 - TIE * np.abs(off))
