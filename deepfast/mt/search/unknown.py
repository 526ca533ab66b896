"""Replaces unknown words of a translation by the source words that they are aligned with.

Luong et al., Addressing the Rare Word Problem in Neural Machine Translation, 2015. The model's
attention is the alignment, and the source word is copied, or translated by a dictionary.
`deepfast.mt.data.posunk` has the paper's other way, without attention.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import evaluating


def check_aligns(model: SearchModel, vocabulary: object) -> Vocabulary:
    """The vocabulary. Refuses one that has no words, and a model without attention over the source,
    alone or in an `Ensemble`.

    Raises:
        ValueError: names the model or the vocabulary.
    """
    if not isinstance(vocabulary, Vocabulary):
        raise ValueError(
            f"replace_unknown: expected a vocabulary of subwords, got {type(vocabulary).__name__}"
        )
    for part in getattr(model, "models", (model,)):
        if getattr(part, "alignment", None) is None:
            name = part.describe() if hasattr(part, "describe") else type(part).__name__
            raise ValueError(
                f"replace_unknown: expected a model with attention over the source, got {name}"
            )
    return vocabulary


def replace_unknown(
    model: SearchModel,
    vocabulary: Vocabulary,
    line: str,
    hypotheses: Sequence[Sequence[int]],
    translations: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The texts of a line's hypotheses; each unk becomes the source word with most attention.

    Where unk pieces that follow each other are aligned with the same word, it is copied once.

    Args:
        model: has ``alignment``, see `deepfast.mt.models.interface`; `check_aligns` checks it.
        vocabulary: the model's.
        line: the source, with at least one piece.
        hypotheses: token ids without bos and eos.
        translations: of source words; one without is copied.
    """
    unknown = vocabulary.unk_id
    rows = [i for i, tokens in enumerate(hypotheses) if unknown in tokens]
    if not rows:
        return [vocabulary.decode(tokens) for tokens in hypotheses]
    words, word_of = vocabulary.words(line)
    device = next(model.parameters()).device
    length = 1 + max(len(hypotheses[i]) for i in rows)
    target = torch.full((len(rows), length), vocabulary.pad_id, device=device)
    for row, i in enumerate(rows):
        given = [vocabulary.bos_id, *hypotheses[i]]
        target[row, : len(given)] = torch.tensor(given)
    tokens = vocabulary.encode(line)
    source = torch.tensor([*tokens, vocabulary.eos_id], device=device)
    with torch.inference_mode(), evaluating(model):
        weights = model.alignment(source.expand(len(rows), -1), target)
    # Neither a language tag nor the eos of the source is a word.
    first = int(len(tokens) > 1 and tokens[0] in vocabulary.tags.values())
    places = (first + weights[..., first:-1].argmax(-1)).tolist()
    texts = {}
    for row, i in enumerate(rows):
        copies, before = [], None
        for token, place in zip(hypotheses[i], places[row], strict=False):
            word = word_of[place] if token == unknown else None
            if word is not None:
                copy = translations.get(words[word], words[word])
                copies.append("" if word == before else copy)
            before = word
        texts[i] = vocabulary.decode(hypotheses[i], unknown=copies)
    return [
        texts[i] if i in texts else vocabulary.decode(tokens) for i, tokens in enumerate(hypotheses)
    ]
