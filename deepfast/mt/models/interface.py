"""What every model of the toolkit has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.mt.checked import Checked, Count, checked
from deepfast.mt.ids import PAD

IGNORED = -100
"""The label of a position that has none."""

DERIVED_FIELDS = ("vocab_size", "target_vocab_size", "languages")
"""Fields of a config that the vocabulary decides, not the recipe; an LSTM knows no languages."""


@checked("ModelConfig: ")
class ModelConfig(Checked):
    """What the config of every model has."""

    vocab_size: Count
    """V of the source; of the target too where target_vocab_size is None."""
    target_vocab_size: Count | None = None
    """V of the target, where it has its own vocabulary."""
    backend: str | None = None
    """See deepfast.backend."""


class ParameterGroup(TypedDict, total=False):
    """Parameters that learn in the same way."""

    params: Sequence[Tensor]
    lr_scale: float
    """Their learning rate as a multiple of the schedule's; 1 where it is absent."""
    decays: bool
    """Whether weight decay applies to them; False where it is absent."""


Part = nn.Module | list[nn.Module]
"""A module, or one side's layers: what has gradient norms of its own."""


class SearchModel(nn.Module):
    """What `deepfast.mt.search` uses of a `TranslationModel` or of an ensemble of them."""

    config: Any
    start: Callable[[Tensor], Any]
    step: Callable[[Tensor, Any], Tensor]
    group: Callable[[Sequence[int]], int]
    alignment: Callable[[Tensor, Tensor], Tensor]
    layer_attention: Callable[..., Tensor]
    describe: Callable[[], str]
    bottom: "TranslationModel"


class TranslationModel(SearchModel):
    """A model that `deepfast.mt.training` trains and `deepfast.mt.search` decodes with.

    Each model defines

        config                                        the `ModelConfig` it was built from
        labelled(source_BS, target_in_BT, target_out_BT) -> (x, labels)
                                                      hidden states (N, D) and labels (N,)
        logit_map() -> (weight, bias)                 maps hidden states to logits: (V, D), and (V,)
                                                      or None
        start(source_BS) -> state                     encodes a batch of sentences
        step(tokens_B, state) -> logits (B, V)        decodes one position more
        state.reorder(index, encoded=...)             keeps some hypotheses of the batch
        describe() -> str                             sizes and choices in one line

    and may define

        alignment(source_BS, target_in_BT) -> (B, T, S)   how much each target word attends to each
                                                      source word
        bottom                                        a whole model inside it, for
                                                      `deepfast.mt.search.deep_shallow`
        encoder.set_recompute, decoder.set_recompute        see `deepfast.nn.TransformerEncoder`

    The methods below have a default that suits most models.
    """

    Config: type[ModelConfig]
    """The class of its sizes and choices."""
    labelled: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    logit_map: Callable[[], tuple[Tensor, Tensor | None]]

    def project(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        return F.linear(x, *self.logit_map())

    def loss(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float = 0.0,
        accuracy: bool = False,
    ) -> tuple[Tensor, ...]:
        """Loss and negative log-likelihood, each summed over the real positions, in nats.

        The positions are those of ``target_in_BT``. The logits are never in memory all at once. The
        loss is label-smoothed; the likelihood is not, and has no gradient. The `penalties` are part
        of the loss of each position.

        With ``accuracy`` also the number of positions whose label has the largest logit, int64.
        """
        x, labels = self.labelled(source_BS, target_in_BT, target_out_BT)
        weight, bias = self.logit_map()
        loss, *more = ops.linear_cross_entropy(
            x, weight, labels, linear_bias=bias, label_smoothing=label_smoothing,
            ignore_index=IGNORED, reduction="sum", return_nll=True, return_correct=accuracy,
            backend=self.config.backend,
        )  # fmt: skip
        for penalty in self.penalties():
            loss = loss + penalty * (target_in_BT != PAD).sum()
        return loss, *more

    def penalties(self) -> list[Tensor]:
        """Scalars that each position adds to the loss."""
        return []

    def set_step(self, step: int) -> None:
        """Called before each training step; steps are counted from 1."""

    @property
    def draws(self) -> bool:
        """Whether a forward pass draws something that all ranks must share, such as its layers.
        They then work on parts of the same micro-batch."""
        return False

    def metrics(self) -> dict[str, float | list[int]]:
        """Further values for the line of metrics."""
        return {}

    def parts(self) -> Mapping[str, Part]:
        """Parts of the model whose gradients have norms of their own in the line of metrics: a
        module, or a list with a side's layers from the first to the last."""
        return {}

    def group(self, tokens: Sequence[int]) -> int:
        """A number that all source sentences of a batch must share."""
        return 0

    def parameter_groups(self) -> list[ParameterGroup]:
        """How the parameters learn: only the matrices of linear layers decay.

        Decay would pull mixing weights, norms, biases and the embedding away from good values.
        """
        matrices = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        learning = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in learning if id(p) in matrices], "decays": True},
            {"params": [p for p in learning if id(p) not in matrices], "decays": False},
        ]


def target_vocab_size(config: Any) -> int:
    """The size of the target's vocabulary, which a config of one's own need not name."""
    return getattr(config, "target_vocab_size", None) or config.vocab_size
