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


class _Block(NamedTuple):
    """Some sentence pairs, and every source word with every target word of its pair: their entries.
    The arrays are (E,)."""

    source: Sentences
    target: Sentences
    sentence: np.ndarray
    """The number of the sentence pair among these."""
    i: np.ndarray
    j: np.ndarray
    """The positions of the two words in their sentences."""
    places: tuple[np.ndarray, np.ndarray]
    """Their places in all source and all target words of these sentence pairs."""

    def keys(self, targets: int) -> np.ndarray:
        """The two words of each entry as one number: source * targets + target."""
        source, target = self.places
        return self.source.ids[source].astype(np.int64) * targets + self.target.ids[target]

    def near(self) -> np.ndarray:
        """1 on the sentence's diagonal, `TIE` less at the corners."""
        down, across = self.source.lengths[self.sentence], self.target.lengths[self.sentence]
        return 1 - TIE * np.abs(self.i / down - self.j / across)


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
            # p(t | s) and p(s | t); before the first round all words are equally likely. The last
            # one is of words that have no entry.
            self._shares = np.ones((2, len(self._keys) + 1))
            self._shares[:, -1] = 0
            say("finding the pairs of words in the text")
            rows = Path(folder, "rows")
            self._write_rows(pairs, rows)
            for number in range(1, rounds + 1):
                say(f"round {number} of {rounds}, {len(self._keys):,} pairs of words")
                self._round(pairs, rows)
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
        for _, block in _blocks(*pairs):
            waiting.append(keep(_different(block.keys(self._targets))))
            # Not after each block, which would take quadratic time, and not all at the end: most
            # keys come in many blocks.
            if sum(map(len, waiting)) > max(len(found), ENTRIES_AT_ONCE):
                found, waiting = _different(np.concatenate([found, *waiting])), []
        return _different(np.concatenate([found, *waiting]))

    def _often(self, pairs: tuple[Sentences, Sentences]) -> Callable[[np.ndarray], np.ndarray]:
        """Keeps, of different keys, those that occur often enough, see above. Two words that share
        a slot with others may be kept too."""
        counts = np.zeros(1 << SLOTS, np.uint8)
        for _, block in _blocks(*pairs):
            slots, times = np.unique(_slot(block.keys(self._targets)), return_counts=True)
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

    def _find(self, block: _Block) -> np.ndarray:
        """The row of each entry in the table; that after the last for words without one."""
        # Sorted, they are found faster.
        different, inverse = np.unique(block.keys(self._targets), return_inverse=True)
        rows = np.searchsorted(self._keys, different)
        known = np.append(self._keys, -1)[rows] == different
        return np.where(known, rows, len(self._keys))[inverse]

    def _write_rows(self, pairs: tuple[Sentences, Sentences], path: Path) -> None:
        """`_find` of the whole text into a file: 4 bytes for each entry."""
        with open(path, "wb") as stream:
            for _, block in _blocks(*pairs):
                self._find(block).astype(np.int32).tofile(stream)

    def _round(self, pairs: tuple[Sentences, Sentences], path: Path) -> None:
        """A round of EM: p(t | s) and p(s | t) of every row."""
        counts = np.zeros_like(self._shares)
        with open(path, "rb") as stream:
            for _, block in _blocks(*pairs):
                rows = np.fromfile(stream, np.int32, len(block.sentence))
                sides = zip(counts, self._shares, block.places[::-1], strict=True)
                for count, share, word in sides:
                    weight = share[rows]
                    norm = np.bincount(word, weight)[word]
                    np.divide(weight, norm, out=weight, where=norm > 0)
                    np.add.at(count, rows, weight)
        self._shares = counts
        for side, share in enumerate(self._shares[:, :-1]):
            word = self._keys % self._targets if side else self._keys // self._targets
            share /= np.bincount(word, share)[word]

    def links(self, text: Iterable[WordPair]) -> Iterator[Links]:
        """The links of each sentence pair. Words that were not in the text have none."""
        rows = iter(text)
        while part := list(itertools.islice(rows, AT_ONCE)):
            links: list[Links] = [[] for _ in part]
            sides = [
                Sentences.of([[ids.get(word, len(ids)) for word in pair[side]] for pair in part])
                for side, ids in enumerate(self._words)
            ]
            for first, block in _blocks(*sides):
                for sentence, j, i in self._linked(block):
                    own = links[first + sentence]
                    if not own or own[-1][1] != j:
                        own.append((i, j))
            yield from links

    def _linked(self, block: _Block) -> list[list[int]]:
        """(sentence, j, i) of the entries where each word is the likeliest for the other."""
        rows, near = self._find(block), block.near()
        chosen = rows < len(self._keys)
        for share, word in zip(self._shares, block.places[::-1], strict=True):
            weight = share[rows] * near
            most = np.zeros(int(word.max(initial=-1)) + 1)
            np.maximum.at(most, word, weight)
            chosen &= weight == most[word]
        return sorted(np.stack((block.sentence, block.j, block.i), 1)[chosen].tolist())

    def most_frequent(self, count: int) -> set[str]:
        """The ``count`` most frequent target words; of equally frequent ones those that come
        first."""
        order = np.argsort(-self.target_counts[:-1], kind="stable")[:count]
        words = list(self._words[1])
        return {words[number] for number in order}


def _different(keys: np.ndarray) -> np.ndarray:
    """The different ones, in rising order."""
    # Without the counts numpy hashes them, which takes ten times as long.
    return np.unique(keys, return_counts=True)[0]


def _slot(keys: np.ndarray) -> np.ndarray:
    # Multiplication by 2^64 / the golden ratio spreads the keys, Knuth 1973, section 6.4.
    return (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS)


def _blocks(source: Sentences, target: Sentences) -> Iterator[tuple[int, _Block]]:
    """The sentence pairs in blocks of about `ENTRIES_AT_ONCE` entries, each with the number of its
    first pair."""
    ends = (source.lengths.astype(np.int64) * target.lengths).cumsum()
    first = 0
    while first < len(ends):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + ENTRIES_AT_ONCE, "right")), first + 1)
        yield first, _block(source.part(first, last), target.part(first, last))
        first = last


def _block(source: Sentences, target: Sentences) -> _Block:
    counts = source.lengths.astype(np.int64) * target.lengths
    sentence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sentence)) - (counts.cumsum() - counts)[sentence]
    i, j = np.divmod(within, target.lengths[sentence])
    places = source.starts[sentence] + i, target.starts[sentence] + j
    return _Block(source, target, sentence, i, j, places)
