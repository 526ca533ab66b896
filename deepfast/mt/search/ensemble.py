"""Several models as one: at every step their probabilities are averaged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.dtypes import compute_dtype
from deepfast.mt.models.interface import SearchModel, target_vocab_size


@dataclass
class EnsembleState:
    """The state of each model."""

    states: list[Any]

    def reorder(self, index: Tensor, *, encoded: bool = True) -> None:
        """Keeps hypotheses ``index`` in each; see `deepfast.mt.models.interface`."""
        for state in self.states:
            state.reorder(index, encoded=encoded)


class Ensemble(SearchModel):
    """Models of any kinds over one vocabulary, with the interface of one model for search.

    ``P(y | x) = 1/M sum_m P_m(y | x)``; `step` returns its logarithm, which is normalised already.

    Args:
        models: at least one, all with the same sizes of both vocabularies.

    Raises:
        ValueError: no model, or models of different vocabularies.
    """

    # A ModuleList, whose type does not include that of its elements.
    models: Sequence[SearchModel]

    def __init__(self, models: Sequence[SearchModel]):
        super().__init__()
        configs = [model.config for model in models]
        sizes = {(c.vocab_size, target_vocab_size(c)) for c in configs}
        if len(sizes) != 1:
            raise ValueError(
                "Ensemble: expected models of one vocab_size and target_vocab_size, got "
                f"{sorted(sizes) or 'none'}"
            )
        self.models = nn.ModuleList(models)  # type: ignore[assignment]
        self.config = configs[0]
        self._groups: dict[tuple[int, ...], int] = {}

    def group(self, tokens: Sequence[int]) -> int:
        """A number that the source sentences of one batch must share, for all models together."""
        # Each model may number the languages in its own way, so combinations get new numbers.
        groups = tuple(model.group(tokens) for model in self.models)
        return self._groups.setdefault(groups, len(self._groups))

    def alignment(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        """The mean of the models' attention; see `deepfast.mt.models.interface`."""
        return torch.stack([m.alignment(source_BS, target_in_BT) for m in self.models]).mean(0)

    def start(self, source_BS: Tensor) -> EnsembleState:
        """Encodes the source with every model."""
        return EnsembleState([model.start(source_BS) for model in self.models])

    def step(self, tokens_B: Tensor, state: EnsembleState) -> Tensor:
        """The last token of each hypothesis (B,) to log-probabilities (B, V) of the next."""
        logits = [
            model.step(tokens_B, one) for model, one in zip(self.models, state.states, strict=True)
        ]
        dtype = compute_dtype(logits[0].dtype)
        log_probs = torch.stack([x.log_softmax(-1, dtype=dtype) for x in logits])
        return log_probs.logsumexp(0) - math.log(len(logits))
