"""The source words that the unknown words of a translation are aligned with.

Luong et al., Addressing the Rare Word Problem in Neural Machine Translation, 2015. The model's
attention is the alignment, and the source word is copied, or translated by a dictionary.
`deepfast.mt.data.posunk` has the paper's other way, without attention.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from deepfast.mt.data import Vocabulary, make_batch
from deepfast.mt.data.vocabulary import SPACE
from deepfast.mt.ids import UNK
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import evaluating


def check_aligns(model: SearchModel) -> None:
    """Refuses a model without attention over the source, alone or in an `Ensemble`."""
    for part in getattr(model, "models", (model,)):
        if getattr(part, "alignment", None) is None:
            raise ValueError(
                f"replace_unknown: expected a model with attention over the source, got "
                f"{part.describe()}"
            )


def aligned_words(
    model: SearchModel,
    vocabulary: Vocabulary,
    line: str,
    hypotheses: Sequence[Sequence[int]],
    dictionary: Mapping[str, str],
) -> list[list[str]]:
    """For each hypothesis of a line, and each unk in it, the source word with most attention.

    Where unk pieces that follow each other are aligned with the same word, all but the first have
    the text "".

    Args:
        model: has ``alignment``, see `deepfast.mt.models.interface`; `check_aligns` checks it.
        vocabulary: the model's.
        line: the source, with at least one piece.
        hypotheses: token ids without bos and eos.
        dictionary: translations of source words; a word without one is copied.
    """
    found: list[list[str]] = [[] for _ in hypotheses]
    rows = [i for i, tokens in enumerate(hypotheses) if UNK in tokens]
    if not rows:
        return found
    pieces, tokens = vocabulary.pieces(line), vocabulary.encode(line)
    # A word begins with a space; what is in front of the first one may be a tag.
    words = "".join(pieces).split(SPACE)
    word_of = [*itertools.accumulate(piece.count(SPACE) for piece in pieces)]
    batch = make_batch([(tokens, given) for given in hypotheses], rows)
    batch = batch.to(next(model.parameters()).device)
    with torch.inference_mode(), evaluating(model):
        weights = model.alignment(batch.source_BS, batch.target_in_BT)
    # Neither a language tag nor the eos of the source is a word.
    first = int(len(tokens) > 1 and tokens[0] in vocabulary.tags.values())
    places = (first + weights[..., first:-1].argmax(-1)).tolist()
    for i, own in zip(rows, places, strict=True):
        before = None
        for token, place in zip(hypotheses[i], own, strict=False):
            word = word_of[place] if token == UNK else None
            if word is not None:
                copy = dictionary.get(words[word], words[word])
                found[i].append("" if word == before else copy)
            before = word
    return found
