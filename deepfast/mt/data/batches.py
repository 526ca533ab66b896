"""Batches under a token budget, in an order that can be resumed exactly.

Pairs are sorted by length and cut into batches, and the batches are shuffled. A batch of n
sentences whose longest side has s tokens costs n * s tokens, padding included.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deepfast import checks
from deepfast.files import DataError
from deepfast.mt.data.pairs import Pair, Pairs
from deepfast.mt.ids import BOS, EOS, PAD

Groups = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, padded on the right; S and T are the longest source and target."""

    source_BS: torch.Tensor
    """(B, S) int64: the tokens, then eos, then padding."""
    target_in_BT: torch.Tensor
    """(B, T) int64: bos, then the tokens, then padding."""
    target_out_BT: torch.Tensor
    """(B, T) int64: the tokens, then eos, then padding."""
    source_tokens: int
    """Source tokens, eos included, padding not."""
    target_tokens: int
    """Target tokens to predict, eos included, padding not."""
    indices: tuple[int, ...]
    """The index of each sentence among the pairs that the batch was made from."""

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on `device`."""
        return replace(
            self,
            source_BS=self.source_BS.to(device),
            target_in_BT=self.target_in_BT.to(device),
            target_out_BT=self.target_out_BT.to(device),
        )

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) int64 each: the tokens of each source and of each target, eos included."""
        return (self.source_BS != PAD).sum(1), (self.target_in_BT != PAD).sum(1)


def make_batch(pairs: Sequence[Pair], indices: Iterable[int]) -> Batch:
    """Pads the pairs at `indices` to one `Batch`; pairs hold ids without bos and eos."""
    indices = tuple(map(int, indices))
    sources, targets = zip(*(pairs[i] for i in indices), strict=True)
    return Batch(
        source_BS=_padded(sources, last=EOS),
        target_in_BT=_padded(targets, first=BOS),
        target_out_BT=_padded(targets, last=EOS),
        source_tokens=sum(map(len, sources)) + len(indices),
        target_tokens=sum(map(len, targets)) + len(indices),
        indices=indices,
    )


def _padded(
    rows: Sequence[Sequence[int]], *, first: int | None = None, last: int | None = None
) -> torch.Tensor:
    """(B, longest + 1) int64: the rows behind ``first`` or before ``last``."""
    begin = 0 if first is None else 1
    table = np.full((len(rows), max(map(len, rows)) + 1), PAD, np.int64)
    for line, row in zip(table, rows, strict=True):
        line[begin : begin + len(row)] = row
        line[0 if last is None else len(row)] = first if last is None else last
    return torch.from_numpy(table)


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some sentences of a batch, with the padding that they need."""
    source, target = (lengths[rows] for lengths in batch.lengths())
    longest = int(target.max())
    return Batch(
        source_BS=batch.source_BS[rows, : int(source.max())],
        target_in_BT=batch.target_in_BT[rows, :longest],
        target_out_BT=batch.target_out_BT[rows, :longest],
        source_tokens=int(source.sum()),
        target_tokens=int(target.sum()),
        indices=tuple(batch.indices[row] for row in rows),
    )


class _Cuts:
    """Pairs sorted by group and length, and cut into batches of one group within the budget. A
    pair that exceeds it alone has a batch of its own.

    Args:
        lengths: (N,) tokens of each pair's longer side.
        kept: the indices of the pairs to cut, any order.
        groups: a number for each pair; None: one group.
    """

    def __init__(
        self, lengths: np.ndarray, kept: np.ndarray, max_tokens: int, groups: Groups | None
    ):
        group = np.zeros(len(lengths), bool) if groups is None else np.asarray(groups)
        keys = (lengths[kept],) if groups is None else (lengths[kept], group[kept])
        self.order = kept[np.lexsort(keys)].astype(np.int32)
        length, new_group = lengths[self.order], np.diff(group[self.order]) != 0
        # Where the length or the group changes: shuffling between two such places keeps the cuts.
        self.equal = _ranges((np.diff(length) != 0) | new_group)
        self.starts: list[int] = []
        for begin, end in _ranges(new_group):
            while begin < end:
                self.starts.append(begin)
                cost = lambda stop, start=begin: (stop - start) * int(length[stop - 1])  # noqa: E731
                stops = range(begin + 1, end + 1)
                begin += max(1, bisect.bisect_right(stops, max_tokens, key=cost))
        self.starts.append(len(self.order))

    def __len__(self) -> int:
        return len(self.starts) - 1


def _ranges(changes: np.ndarray) -> list[tuple[int, int]]:
    """The ranges between the places where something changes; ``changes`` has an entry for each two
    neighbours."""
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(changes) + 1]
    return [*itertools.pairwise(bounds)]


class TokenBatches:
    """The batches of a training run, epoch after epoch.

    Each `for` loop yields the rest of the current epoch:
    `for epoch in range(n): for batch in batches:` trains n epochs. A loop that is left early
    continues with the very next batch when it is entered again.

    The order of an epoch depends only on (seed, epoch) and the pairs. Every kept pair occurs
    exactly once per epoch.

    Attributes:
        position: batches that have been yielded, of all epochs.
        dropped: how many pairs are not in any batch, and why, in words.
    """

    def __init__(
        self,
        pairs: Pairs | Iterable[Pair],
        *,
        max_tokens: int,
        seed: int = 0,
        max_length: int = 256,
        groups: Groups | None = None,
    ) -> None:
        """
        Args:
            pairs: (source ids, target ids) without bos and eos.
            max_tokens: most tokens of a batch on either side, padding included: the number of
                sentences times the longest of them.
            max_length: most tokens of a side, bos or eos included. A pair with a longer one, or
                with one that exceeds ``max_tokens``, is dropped.
            groups: a number for each pair, such as its language. All pairs of a batch have the
                same one. None: one group.

        Raises:
            ValueError: an argument out of range.
            DataError: no pair is left.
        """
        checks.whole("TokenBatches", max_tokens=max_tokens, max_length=max_length)
        self.pairs = pairs = pairs if isinstance(pairs, Pairs) else Pairs.of(pairs)
        self.max_tokens, self.max_length, self.seed = max_tokens, max_length, seed
        self.position = 0
        lengths, most = _lengths(pairs), min(max_length, max_tokens)
        kept = np.flatnonzero(lengths <= most)
        long = len(pairs) - len(kept)
        self.dropped = (
            f"{pairs.dropped + long:,} pairs dropped: {pairs.dropped:,} empty, {long:,} too long"
        )
        if not len(kept):
            raise DataError(
                f"expected at least one pair of at most {most} tokens, got {len(pairs)} longer ones"
            )
        self._cuts = _Cuts(lengths, kept, max_tokens, groups)
        self._order: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches of an epoch; the same in every epoch."""
        return len(self._cuts)

    def indices(self, epoch: int, position: int) -> np.ndarray:
        """The indices of the pairs of a batch of an epoch."""
        if self._order is None or self._order[0] != (self.seed, epoch):
            order, batches = self._cuts.order.copy(), np.arange(len(self))
            # Numpy keeps the numbers of this class the same in every release.
            generator = np.random.RandomState(np.random.MT19937([self.seed % 2**64, epoch]))
            for start, end in self._cuts.equal:
                generator.shuffle(order[start:end])
            generator.shuffle(batches)
            self._order = (self.seed, epoch), order, batches
        _, order, batches = self._order
        number = batches[position]
        return order[self._cuts.starts[number] : self._cuts.starts[number + 1]]

    def __iter__(self) -> Iterator[Batch]:
        end = (self.position // len(self) + 1) * len(self)
        while self.position < end:
            indices = self.indices(*divmod(self.position, len(self)))
            # Before the yield: a state taken while the batch is in use must not repeat the batch.
            self.position += 1
            yield make_batch(self.pairs, indices)

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last."""
        return max(self.position - 1, 0) // len(self)

    def largest(self) -> Batch:
        """This epoch's batch with the most tokens on both sides; the position does not change."""
        tokens = self.pairs.source.lengths + self.pairs.target.lengths + 2
        batches = (self.indices(self.epoch, position) for position in range(len(self)))
        return make_batch(self.pairs, max(batches, key=lambda b: tokens[b].sum()))

    def state_dict(self) -> dict[str, Any]:
        """The position of the run as plain values for a checkpoint."""
        return {"seed": self.seed, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the very next batch after `state_dict`, in the order of its seed.

        Raises:
            DataError: the state was taken with other pairs or another budget: other batches would
                follow.
        """
        for key, mine in self._identity().items():
            if state[key] != mine:
                what = "other sentence pairs: " * (key == "pairs")
                raise DataError(
                    f"cannot resume, the state was taken with {what}{key} {state[key]}, got {mine}"
                )
        self.seed, self.position = state["seed"], state["position"]

    def _identity(self) -> dict[str, Any]:
        lengths = {"max_tokens": self.max_tokens, "max_length": self.max_length}
        return lengths | {"pairs": self.pairs.digest}


def evaluation_batches(
    pairs: Pairs | Iterable[Pair], *, max_tokens: int, groups: Groups | None = None
) -> list[Batch]:
    """All pairs once, sorted by length.

    ``groups`` has a number for each pair; pairs of different numbers never share a batch. No pair
    is dropped: a sentence longer than `max_tokens` gets a batch of its own. To translate, give
    pairs of a source and an empty target.
    """
    pairs = pairs if isinstance(pairs, Pairs) else Pairs.of(pairs)
    if not len(pairs):
        return []
    cuts = _Cuts(_lengths(pairs), np.arange(len(pairs)), max_tokens, groups)
    ranges = itertools.pairwise(cuts.starts)
    return [make_batch(pairs, cuts.order[start:end]) for start, end in ranges]


def _lengths(pairs: Pairs) -> np.ndarray:
    """Tokens of the longer side of each pair; eos on the source, bos or eos on the target."""
    return np.maximum(pairs.source.lengths, pairs.target.lengths) + 1
