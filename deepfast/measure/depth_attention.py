"""The weights that attention residuals give to their sources, as the mean over sentences."""

import contextlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepfast.mt.data.vocabulary import Vocabulary
from deepfast.mt.ids import PAD
from deepfast.mt.models import Transformer
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import Hypothesis, beam_search
from deepfast.mt.search.options import DEFAULTS
from deepfast.mt.search.translate import decode_lines
from deepfast.nn import AttentionResiduals


def attention_residuals(model: SearchModel) -> list[AttentionResiduals]:
    """Those of the model's stacks."""
    return [module for module in model.modules() if isinstance(module, AttentionResiduals)]


class _Mean:
    """The mean of a module's weights over all tokens of its passes; a hook of the module."""

    def __init__(self):
        self.pushed: list[Tensor] = []
        self.total, self.tokens = torch.zeros(()), 0

    def __call__(self, module: AttentionResiduals, args: tuple, given: dict) -> None:
        y, residual = args[0], given.get("residual")
        self.pushed.append(y if residual is None else y + residual)
        if len(self.pushed) == module.rows:
            count = y.numel() // module.dim
            self.total = self.total + count * module.mean_weights(self.pushed).float().cpu()
            self.tokens += count
            self.pushed.clear()


def mean_attention(
    model: SearchModel, vocabulary: Vocabulary, lines: Sequence[str]
) -> dict[AttentionResiduals, Tensor]:
    """The mean weights (rows, rows) of each of the model's attention residuals.

    The tokens are those of the lines; in a decoder those of the model's own translations.

    Args:
        model: in evaluation mode.

    Raises:
        ValueError: lines without text.
    """
    means = {module: _Mean() for module in attention_residuals(model)}

    def decode(source_BS: Tensor) -> list[list[Hypothesis]]:
        best = beam_search(model, source_BS, DEFAULTS)
        rows = [torch.tensor([vocabulary.bos_id, *found[0].tokens]) for found in best]
        target_BT = pad_sequence(rows, batch_first=True, padding_value=PAD)
        with contextlib.ExitStack() as hooks:
            for module, mean in means.items():
                hooks.enter_context(module.register_forward_pre_hook(mean, with_kwargs=True))
            cast(Transformer, model).decode(source_BS, target_BT.to(source_BS.device))
        return best

    with torch.inference_mode():
        decode_lines(model, vocabulary, lines, decode, max_tokens=DEFAULTS.max_tokens)
    if not all(mean.tokens for mean in means.values()):
        raise ValueError("expected sentences with words, got none")
    return {module: mean.total / mean.tokens for module, mean in means.items()}
