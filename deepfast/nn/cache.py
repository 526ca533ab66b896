"""The keys, values and hypotheses that decoding keeps from one position to the next.

The rows of a batch are hypotheses, some of each sentence. Their keys and values are kept once for
each sentence, in the order in which they came, and a table says which of them a hypothesis sees. So
hypotheses are reordered by changing that table alone, and those of one sentence read the keys of
the encoder's output together. On a CPU attention reads the columns in the table; elsewhere torch's
SDPA reads all columns under a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepfast.nn.linear import Gate
from deepfast.nn.packing import Packing
from deepfast.ops.decoding import cached_attention


class Hypotheses:
    """Which hypotheses a batch has, and which columns of its sentences' keys each of them sees.

    A step adds one column for each of the ``packing.length`` places that a sentence has.
    """

    def __init__(self, sentences: int, device: torch.device):
        self.device = device
        self.packing = Packing(sentences, 1)
        """The places of the hypotheses: (sentences, the most hypotheses that a sentence has)."""
        self.places = torch.arange(sentences, device=device)
        """The place of every row in the flattened ``packing``."""
        self.starts: list[int] = []
        """The first column of every position."""
        self.columns = 0
        self.seen = torch.empty(sentences, 0, dtype=torch.int64, device=device)
        """(rows, positions): of every position the column that a row sees."""
        self._masks: dict[torch.dtype, Tensor] = {}

    def advance(self) -> None:
        """Adds the columns of one position; each hypothesis sees its own."""
        width = self.packing.length
        column = self.places % width + self.columns
        self.seen = torch.cat((self.seen, column.unsqueeze(1)), 1)
        self.starts.append(self.columns)
        self.columns += width
        self._masks = {}

    def reached(self, left: int) -> int:
        """The first of the last ``left`` positions before the last; 0 where it is -1."""
        return max(0, len(self.starts) - 1 - left) if left >= 0 else 0

    def mask(self, first: int, dtype: torch.dtype) -> Tensor | None:
        """The mask to add to the scores of the columns from ``first`` on, (sentences, 1, places,
        N); None for nothing."""
        if self.columns == len(self.starts):
            return None
        if dtype not in self._masks:
            sentences, width = self.packing.batch, self.packing.length
            # An empty place sees everything: its result is not used.
            hidden = torch.zeros(sentences * width, self.columns, dtype=dtype, device=self.device)
            rows = hidden.new_full((len(self.places), self.columns), -torch.inf)
            hidden[self.places] = rows.scatter_(1, self.seen, 0)
            self._masks[dtype] = hidden.view(sentences, 1, width, self.columns)
        return self._masks[dtype][..., first:]

    def reorder(self, index: Tensor) -> Tensor | None:
        """Keeps rows ``index``. Returns which sentences still have their keys, None for all.

        Sentences without a row stay until they are a quarter of all.
        """
        batch, rows = self.packing.batch, torch.arange(len(index), device=self.device)
        sentences = self.packing.sentences(self.device)[index]
        counts = sentences.bincount(minlength=batch)
        kept = counts.nonzero().squeeze(1)
        leave = 4 * len(kept) <= 3 * batch
        if leave:
            sentences, counts = (counts > 0).cumsum(0).sub_(1)[sentences], counts[kept]
            batch = len(kept)
        width = max(1, int(counts.max())) if batch else 1
        # The rows of a sentence take its places in their order.
        order = sentences.argsort(stable=True)
        slots = rows - (counts.cumsum(0) - counts)[sentences[order]]
        self.places = torch.empty_like(rows).scatter_(0, order, sentences[order] * width + slots)
        if torch.equal(self.places, torch.arange(batch * width, device=self.device)):
            self.packing = Packing(batch, width)
        else:
            padding = torch.ones(batch * width, dtype=torch.bool, device=self.device)
            padding = padding.index_fill_(0, self.places, False).view(batch, width)
            self.packing = Packing(batch, width, self.places, padding)
        self.seen = self.seen.index_select(0, index)
        self._masks = {}
        return kept if leave else None


@dataclass
class KeyValueCache:
    """Keys and values of the positions decoded so far, one column for each hypothesis."""

    hypotheses: Hypotheses
    key_value: Tensor | None = None
    """(B, C, 2 G d): the columns from ``first`` on, then room for more."""
    first: int = 0
    """How many columns were dropped, because no window reaches them any more."""
    views: tuple[Tensor, Tensor] | None = None
    """All of ``key_value`` as keys and values (B, G, C, d), made where they are needed."""

    def room(self, like: Tensor, groups: int, channels: int, left: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, N, d) of the last ``left`` positions, of all where it is -1, and
        of this one, whose columns are not yet written. Their dtype is that of ``like``."""
        at, width = self.hypotheses, self.hypotheses.packing.length
        reached = at.starts[at.reached(left)]
        if self.key_value is None or at.columns - self.first > self.key_value.shape[1]:
            old = self.key_value
            size = max(16 * width, 2 * (at.columns - reached))
            self.key_value = like.new_empty(at.packing.batch, size, 2 * groups * channels)
            if old is not None:
                kept = old[:, reached - self.first : at.columns - width - self.first]
                self.key_value[:, : kept.shape[1]] = kept
            self.first, self.views = reached, None
        filled = self.key_value[:, reached - self.first : at.columns - self.first]
        k, v = filled.view(*filled.shape[:2], 2, groups, channels).permute(2, 0, 3, 1, 4)
        return k, v

    def append(
        self, key: Tensor, value: Tensor, left: int = -1
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes keys and values of the current position, each (B, G, S, d), to the cache.

        Returns:
            The keys and values of `room`, now filled, and their attention mask, see
            `Hypotheses.mask`.
        """
        _, groups, width, channels = key.shape
        k, v = self.room(key, groups, channels, left)
        k[:, :, -width:], v[:, :, -width:] = key, value
        reached = self.hypotheses.starts[self.hypotheses.reached(left)]
        return k, v, self.hypotheses.mask(reached, key.dtype)

    def attend(self, q: Tensor, key: Tensor, value: Tensor, num_heads: int, left: int) -> Tensor:
        """Adds the hypotheses' position and returns the result of `cached_attention` for it: q
        (R, H d), key and value (R, G d)."""
        at, channels = self.hypotheses, q.shape[1] // num_heads
        if self.key_value is None or at.columns - self.first > self.key_value.shape[1]:
            self.room(q, key.shape[1] // channels, channels, left)
        if self.views is None:
            assert self.key_value is not None
            views = self.key_value.unflatten(2, (2, -1, channels)).permute(2, 0, 3, 1, 4)
            self.views = views[0], views[1]
        columns = at.seen if left < 0 else at.seen[:, at.reached(left) :] - self.first
        sentences = at.packing.sentences(q.device)
        return cached_attention(q, *self.views, sentences, new=(key, value), columns=columns)

    def keep(self, sentences: Tensor) -> None:
        """Keeps these sentences of the batch."""
        if self.key_value is not None:
            self.key_value = self.key_value.index_select(0, sentences)
            self.views = None


@dataclass
class DecoderCache:
    """The memory of decoding one position at a time, per layer."""

    encoded: list[tuple[Tensor, Tensor] | None]
    """Keys and values of the encoder's output; None for a layer that is not used."""
    encoded_packing: Packing
    gates: Sequence[Gate | None]
    """The gates of latent depth, the same for all steps."""
    hypotheses: Hypotheses
    layers: list[KeyValueCache] = field(init=False)
    steps: list | None = None
    """See `deepfast.nn.step.layer_steps`; None before the first step."""

    def __post_init__(self) -> None:
        self.layers = [KeyValueCache(self.hypotheses) for _ in self.encoded]

    def reorder(self, index: Tensor) -> None:
        """Keeps hypotheses ``index`` (B',) of the batch, repeats allowed."""
        kept = self.hypotheses.reorder(index)
        if kept is None:
            return
        for cache in self.layers:
            cache.keep(kept)
        self.encoded = [
            kv and (kv[0].index_select(0, kept), kv[1].index_select(0, kept)) for kv in self.encoded
        ]
        length, padding = self.encoded_packing.length, self.encoded_packing.padding
        padding = None if padding is None else padding[kept]
        self.encoded_packing = Packing(kept.numel(), length, None, padding)
