"""What decoding keeps from one position to the next.

The rows of a batch are hypotheses, some of each sentence. Their keys and values are kept once for
each sentence, in the order in which they came, and a mask says which of them a hypothesis sees. So
hypotheses are reordered by changing that mask alone, and those of one sentence read the keys of
the encoder's output together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepfast.nn.connections.latent import Gate
from deepfast.nn.packing import Packing


class Hypotheses:
    """Which hypotheses a batch has, and which columns of its sentences' keys each of them sees.

    A step adds one column for each of the ``packing.length`` places that a sentence has.
    """

    def __init__(self, sentences: int, device: torch.device):
        self.device = device
        self.packing = Packing(sentences, 1)
        """The places of the hypotheses: (sentences, the most hypotheses that a sentence has)."""
        self.places = list(range(sentences))
        """Of every row the place in the flattened ``packing``."""
        self.starts: list[int] = []
        """Of every position its first column."""
        self.columns = 0
        self.seen: Tensor | None = None
        """(sentences, places, columns) bool; None where all see everything."""
        self._masks: dict[torch.dtype, Tensor] = {}

    def advance(self) -> None:
        """Adds the columns of one position; each hypothesis sees its own."""
        sentences, width = self.packing.batch, self.packing.length
        self.starts.append(self.columns)
        self.columns += width
        if self.seen is not None:
            own = torch.eye(width, dtype=torch.bool, device=self.device)
            self.seen = torch.cat((self.seen, own.expand(sentences, -1, -1)), 2)
        self._masks = {}

    def mask(self, first: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of the columns from ``first`` on, (sentences, 1, places, N);
        None for nothing."""
        if self.seen is None:
            return None
        if dtype not in self._masks:
            hidden = torch.zeros(self.seen.shape, dtype=dtype, device=self.device)
            self._masks[dtype] = hidden.masked_fill_(~self.seen, -torch.inf).unsqueeze(1)
        return self._masks[dtype][..., first:]

    def reorder(self, index: Tensor) -> Tensor | None:
        """Keeps rows ``index``. Returns which sentences still have their keys, None for all.

        Sentences without a row stay until they are a quarter of all.
        """
        sentences, before = self.packing.batch, self.packing.length
        chosen = [self.places[row] for row in index.tolist()]
        rows: dict[int, list[int]] = {}
        for row, place in enumerate(chosen):
            rows.setdefault(place // before, []).append(row)
        stay = sorted(rows) if 4 * len(rows) <= 3 * sentences else list(range(sentences))
        width = max(map(len, rows.values()), default=1)
        self.places, sources = [0] * len(chosen), []
        for number, sentence in enumerate(stay):
            mine = rows.get(sentence, [])
            for slot, row in enumerate(mine):
                self.places[row] = number * width + slot
            # An empty place sees what any other does: its result is not used.
            sources += [chosen[row] for row in mine]
            sources += [sentence * before] * (width - len(mine))
        device, places = self.device, torch.tensor(self.places, dtype=torch.int64)
        if self.seen is None and width > 1:
            self.seen = torch.ones(sentences, before, self.columns, dtype=torch.bool, device=device)
        if self.seen is not None:
            source = torch.tensor(sources, dtype=torch.int64, device=device)
            seen = self.seen.flatten(0, 1).index_select(0, source)
            self.seen = seen.view(len(stay), width, self.columns)
        if self.places == list(range(len(stay) * width)):
            self.packing = Packing(len(stay), width)
        else:
            padding = torch.ones(len(stay) * width, dtype=torch.bool).index_fill_(0, places, False)
            padding = padding.view(len(stay), width).to(device)
            self.packing = Packing(len(stay), width, places.to(device), padding)
        self._masks = {}
        return None if len(stay) == sentences else torch.tensor(stay, device=device)


@dataclass
class KeyValueCache:
    """Keys and values of the positions decoded so far, one column for each hypothesis."""

    hypotheses: Hypotheses
    key_value: Tensor | None = None
    """(B, C, 2 G d): the columns from ``first`` on, then room for more."""
    first: int = 0
    """How many columns were dropped, because no window reaches them any more."""

    def append(
        self, key: Tensor, value: Tensor, left: int = -1
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds the columns of the hypotheses' position, each (B, G, S, d).

        Returns:
            Keys and values (B, G, N, d) of the last ``left`` positions and of this one, of all
            where it is -1; and the mask of these columns, see `Hypotheses.mask`.
        """
        batch, groups, width, channels = key.shape
        columns, starts = self.hypotheses.columns, self.hypotheses.starts
        reached = starts[max(0, len(starts) - 1 - left)] if left >= 0 else 0
        if self.key_value is None or columns - self.first > self.key_value.shape[1]:
            old = self.key_value
            size = max(16 * width, 2 * (columns - reached))
            self.key_value = key.new_empty(batch, size, 2 * groups * channels)
            if old is not None:
                kept = old[:, reached - self.first : columns - width - self.first]
                self.key_value[:, : kept.shape[1]] = kept
            self.first = reached
        filled = self.key_value[:, reached - self.first : columns - self.first]
        k, v = (
            half.unflatten(-1, (groups, channels)).transpose(1, 2) for half in filled.chunk(2, -1)
        )
        k[:, :, -width:], v[:, :, -width:] = key, value
        return k, v, self.hypotheses.mask(reached, key.dtype)

    def keep(self, sentences: Tensor) -> None:
        """Keeps these sentences of the batch."""
        if self.key_value is not None:
            self.key_value = self.key_value.index_select(0, sentences)


@dataclass
class DecoderCache:
    """What decoding one position at a time keeps, per layer."""

    encoded: list[tuple[Tensor, Tensor] | None]
    """Keys and values of the encoder's output; None for a layer that is not used."""
    encoded_packing: Packing
    gates: Sequence[Gate | None]
    """Of latent depth, the same for all steps."""
    hypotheses: Hypotheses
    layers: list[KeyValueCache] = field(init=False)

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
