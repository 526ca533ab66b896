"""Batches under a token budget, in an order that can be resumed exactly.

Pairs are sorted by length and cut into batches, and the batches are shuffled. A batch of n
sentences whose longest side has s tokens costs n * s tokens, padding included. No batch costs more
than the budget.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from deepfast import checks
from deepfast.files import DataError
from deepfast.mt.data.text import Dropped
from deepfast.mt.data.vocabulary import BOS, EOS, PAD

Pair = tuple[Sequence[int], Sequence[int]]
Output = TypeVar("Output")


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, padded on the right; S and T are the longest source and target."""

    source_BS: torch.Tensor
    """(B, S) int64: the tokens, then eos, then padding."""
    target_in_BT: torch.Tensor
    """(B, T) int64: bos, then the tokens, then padding."""
    target_out_BT: torch.Tensor
    """(B, T) int64: the tokens, then eos, then padding."""
    source_lengths_B: torch.Tensor
    """(B,) int32: source tokens of each sentence, eos included."""
    target_lengths_B: torch.Tensor
    """(B,) int32: target tokens of each sentence, bos or eos included."""
    source_tokens: int
    """Source tokens, eos included, padding not."""
    target_tokens: int
    """Target tokens to predict, eos included, padding not."""
    indices: tuple[int, ...]
    """The index of each sentence in the list of pairs that the batch was made from."""

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`."""
        tensors: dict[str, Any] = {
            name: x.to(device, non_blocking=non_blocking)
            for name, x in vars(self).items()
            if isinstance(x, torch.Tensor)
        }
        return replace(self, **tensors)


def make_batch(
    pairs: Sequence[Pair],
    indices: Sequence[int],
    *,
    pad_id: int = PAD,
    bos_id: int = BOS,
    eos_id: int = EOS,
) -> Batch:
    """Pad the pairs at `indices` into one `Batch`; pairs hold ids without bos and eos."""
    sources = [[*pairs[i][0], eos_id] for i in indices]
    targets = [pairs[i][1] for i in indices]
    source_lengths = [len(source) for source in sources]
    target_lengths = [len(target) + 1 for target in targets]
    return Batch(
        source_BS=_padded(sources, pad_id),
        target_in_BT=_padded([[bos_id, *target] for target in targets], pad_id),
        target_out_BT=_padded([[*target, eos_id] for target in targets], pad_id),
        source_lengths_B=torch.tensor(source_lengths, dtype=torch.int32),
        target_lengths_B=torch.tensor(target_lengths, dtype=torch.int32),
        source_tokens=sum(source_lengths),
        target_tokens=sum(target_lengths),
        indices=tuple(indices),
    )


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some sentences of a batch, with the padding that they need."""
    source, target = batch.source_lengths_B[rows], batch.target_lengths_B[rows]
    longest = int(target.max())
    return Batch(
        source_BS=batch.source_BS[rows, : int(source.max())],
        target_in_BT=batch.target_in_BT[rows, :longest],
        target_out_BT=batch.target_out_BT[rows, :longest],
        source_lengths_B=source,
        target_lengths_B=target,
        source_tokens=int(source.sum()),
        target_tokens=int(target.sum()),
        indices=tuple(batch.indices[row] for row in rows),
    )


class TokenBatches:
    """The batches of a training run, epoch after epoch.

    Each `for` loop yields the rest of the current epoch and then moves on to the next one.
    `for epoch in range(n): for batch in batches:` trains n epochs. A loop that is left early
    continues with the very next batch when it is entered again.

    The order of an epoch depends only on (seed, epoch) and the pairs. Every kept pair occurs
    exactly once per epoch.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        max_tokens: int,
        seed: int = 0,
        max_length: int = 256,
        shuffle: bool = True,
        pad_id: int = PAD,
        bos_id: int = BOS,
        eos_id: int = EOS,
        place: Callable[[int], str] = "example {}".format,
        groups: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            pairs: (source ids, target ids) without bos and eos.
            max_tokens: most tokens of a batch on either side, padding included: the number of
                sentences times the longest of them.
            max_length: most tokens of a side, bos or eos included. A longer pair is dropped and
                counted in `dropped`.
            shuffle: False keeps the batches of every epoch in order of length.
            place: names pair i in messages, such as `ParallelText.place`.
            groups: a number for each pair, such as its language. All pairs of a batch have the
                same one. None: one group.

        Raises:
            ValueError: an argument out of range.
            DataError: a sentence alone exceeds `max_tokens`, or no pair is left.
        """
        op = "TokenBatches"
        checks.whole(op, max_tokens=max_tokens, max_length=max_length)
        self.pairs = pairs
        self.max_tokens, self.max_length, self.seed = max_tokens, max_length, seed
        self.shuffle = shuffle
        self.dropped = Dropped()
        self.epoch = 0
        """The epoch of the batch yielded last."""
        self.position = 0
        """Batches of this epoch that have been yielded."""
        self._ids = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
        self._lengths = [_length(pair) for pair in pairs]
        self._groups = [0] * len(pairs) if groups is None else list(groups)
        kept = []
        for i, length in enumerate(self._lengths):
            if length > max_length:
                self.dropped.add("too_long", place(i))
            else:
                kept.append(i)
        if not kept:
            raise DataError(
                f"expected at least one pair of at most {max_length} tokens, got {len(pairs)} "
                "pairs, all longer"
                if self._lengths
                else "expected at least one pair, got none"
            )
        # Sorted by group and length only, so the cuts are the same in every epoch.
        self._kept = sorted(kept, key=self._key)
        worst = max(self._kept, key=self._lengths.__getitem__)
        if self._lengths[worst] > max_tokens:
            raise DataError(
                f"{place(worst)}: a sentence of {self._lengths[worst]} tokens does not fit into "
                f"max_tokens={max_tokens}: raise max_tokens or lower max_length={max_length}"
            )
        self._cuts = _cut([self._key(i) for i in self._kept], max_tokens)
        self._fingerprint: str | None = None

    def _key(self, index: int) -> tuple[int, int]:
        return self._groups[index], self._lengths[index]

    def __len__(self) -> int:
        """Batches of an epoch; the same in every epoch."""
        return len(self._cuts)

    def order(self, epoch: int) -> list[list[int]]:
        """For each batch of an epoch the indices of its pairs."""
        kept, cuts = list(self._kept), list(self._cuts)
        if self.shuffle:
            # A string seeds by SHA-512, the same in every process and Python version.
            generator = random.Random(f"deepfast batches {self.seed} {epoch}")
            generator.shuffle(kept)
            kept.sort(key=self._key)
            generator.shuffle(cuts)
        return [kept[start:end] for start, end in cuts]

    def __iter__(self) -> Iterator[Batch]:
        self._turn_page()
        epoch, order = self.epoch, self.order(self.epoch)
        while self.epoch == epoch and self.position < len(self):
            indices = order[self.position]
            # Before the yield: a state taken while the batch is in use must not repeat the batch.
            self.position += 1
            yield make_batch(self.pairs, indices, **self._ids)
        self._turn_page()

    def largest(self) -> Batch:
        """This epoch's batch with the most tokens on both sides; the position does not change."""
        pairs = self.pairs
        indices = max(
            self.order(self.epoch),
            key=lambda batch: sum(len(side) + 1 for i in batch for side in pairs[i]),
        )
        return make_batch(pairs, indices, **self._ids)

    def _turn_page(self) -> None:
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Continue with batch `position` of `epoch`."""
        if epoch < 0 or not 0 <= position <= len(self):
            raise DataError(
                f"expected an epoch from 0 and a position from 0 to {len(self)}, got epoch "
                f"{epoch} and position {position}"
            )
        self.epoch, self.position = epoch, position

    def fingerprint(self) -> str:
        """A digest of the kept pairs and special ids: equal digests give equal batches."""
        if self._fingerprint is None:
            digest = hashlib.sha256(repr(self._ids).encode())
            for i in sorted(self._kept):
                for side in self.pairs[i]:
                    digest.update(array("q", (i, len(side), *side)).tobytes())
            if any(self._groups):
                digest.update(array("q", self._groups).tobytes())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """The position of the run as plain values for a checkpoint."""
        done = self.position == len(self)
        return {
            "seed": self.seed,
            "epoch": self.epoch + done,
            "position": 0 if done else self.position,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the very next batch after `state_dict`, in the order of its seed.

        Raises:
            DataError: the state was taken with other pairs, another budget or without the same
                shuffling: other batches would follow.
        """
        identity = self._identity()
        missing = [key for key in ("seed", "epoch", "position", *identity) if key not in state]
        if missing:
            raise DataError(f"the state of the batches lacks {', '.join(missing)}")
        for key, mine in identity.items():
            if state[key] != mine:
                what = key
                if key == "fingerprint":
                    what = "other sentence pairs, max_length or special ids: fingerprint"
                raise DataError(
                    f"cannot resume, the state was taken with {what} {state[key]}, got {mine}"
                )
        self.set_epoch(state["epoch"], state["position"])
        self.seed = state["seed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "max_tokens": self.max_tokens,
            "shuffle": self.shuffle,
        }


def evaluation_batches(
    pairs: Sequence[Pair],
    *,
    max_tokens: int,
    pad_id: int = PAD,
    bos_id: int = BOS,
    eos_id: int = EOS,
    groups: Sequence[int] | None = None,
) -> list[Batch]:
    """All pairs once, sorted by length; `restore_order` puts outputs back into their order.

    ``groups`` has a number for each pair; pairs of different numbers never share a batch. No pair
    is dropped: a sentence longer than `max_tokens` gets a batch of its own. To translate, give
    pairs of a source and an empty target.
    """
    checks.whole("evaluation_batches", max_tokens=max_tokens)
    lengths = [_length(pair) for pair in pairs]
    groups = groups or [0] * len(pairs)
    order = sorted(
        range(len(pairs)), key=lambda i: (lengths[i] > max_tokens, groups[i], lengths[i])
    )
    cuts = _cut([(groups[i], lengths[i]) for i in order], max_tokens)
    ids = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
    return [make_batch(pairs, order[start:end], **ids) for start, end in cuts]


def restore_order(batches: Sequence[Batch], outputs: Sequence[Sequence[Output]]) -> list[Output]:
    """One output per sentence, in the order of the pairs that the batches were made from.

    Args:
        batches: from `evaluation_batches`.
        outputs: for each batch a list with one output per sentence.

    Raises:
        DataError: the counts differ.
    """
    expected, got = [len(batch) for batch in batches], [len(output) for output in outputs]
    if expected != got:
        raise DataError(
            f"restore_order: expected {len(expected)} batches with {sum(expected)} outputs, one "
            f"for each sentence, got {len(got)} with {sum(got)}"
        )
    placed = {
        index: value
        for batch, output in zip(batches, outputs, strict=True)
        for index, value in zip(batch.indices, output, strict=True)
    }
    return [placed[index] for index in sorted(placed)]


def _length(pair: Pair) -> int:
    """Tokens of the longer side; eos on the source, bos or eos on the target."""
    return max(len(pair[0]), len(pair[1])) + 1


def _cut(keys: Sequence[tuple[int, int]], max_tokens: int) -> list[tuple[int, int]]:
    """Cut ascending (group, length) into ranges of one group within the budget; a length that
    exceeds it alone has its own range."""
    cuts, start = [], 0
    for i, (group, length) in enumerate(keys):
        if i == start:
            continue
        if group != keys[start][0] or (i + 1 - start) * length > max_tokens:
            cuts.append((start, i))
            start = i
    return [*cuts, (start, len(keys))] if keys else cuts


def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], dtype=torch.int64)
