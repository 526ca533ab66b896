"""Deep-shallow decoding: a grown model and its bottom translate, and each scores both results.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019: the shallow network (the bottom
alone) and the deep one both find n-best translations, and all of them are ranked by

    s(Y) = (alpha * log P_own(Y|X) + (1 - alpha) * log P_other(Y|X)) / |Y|^gamma

where "own" is the network that found Y and |Y| counts eos. `deepfast.mt.search.tuning` finds alpha
and gamma on a dev text. The paper gives no formula; this one is from the authors' script. The
log-probabilities there are means over the tokens, so its ``alpha = 0.5, gamma = -0.4`` is
``alpha = 0.5, gamma = 0.6`` here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from deepfast.mt.models import kind_of
from deepfast.mt.models.interface import SearchModel, TranslationModel
from deepfast.mt.search.beam import beam_search, score_hypotheses
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.options import DecodingOptions

Scored = tuple[float, tuple[int, ...]]
"""The score of a translation and its token ids, without bos and eos."""


@dataclass(frozen=True)
class Candidate:
    """A translation and its log-probability by each network."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    own: float
    """log P by the network that found it, eos included."""
    other: float
    """log P by the other one."""


def check_grown(model: SearchModel) -> TranslationModel:
    """The model, which has a bottom.

    Raises:
        ValueError: the model has not grown, or is an `Ensemble`.
    """
    if isinstance(model, Ensemble):
        got = f"{len(model.models)} models"
    elif hasattr(model, "bottom"):
        return cast(TranslationModel, model)
    else:
        got = kind_of(model.config)
    raise ValueError(
        f"deep-shallow decoding: expected one model of the kind depth_growing, got {got}"
    )


def candidates(
    model: TranslationModel, source_BS: Tensor, options: DecodingOptions
) -> list[list[Candidate]]:
    """For each sentence of a batch (B, S) the ``options.beam`` translations of the deep network,
    best first, and then those of its bottom."""
    options = replace(options, nbest=options.beam)
    results: list[list[Candidate]] = [[] for _ in source_BS]
    for own, other in ((model, model.bottom), (model.bottom, model)):
        found = beam_search(own, source_BS, options)
        scores = score_hypotheses(other, source_BS, [[h.tokens for h in best] for best in found])
        for result, best, judged in zip(results, found, scores, strict=True):
            result += [
                Candidate(h.tokens, h.log_prob, score)
                for h, score in zip(best, judged, strict=True)
            ]
    return results


def ranked(found: Sequence[Candidate], alpha: float, gamma: float) -> list[Scored]:
    """The candidates, best first, each text once; of equals the first candidate comes first."""
    best: dict[tuple[int, ...], float] = {}
    for candidate in found:
        mixed = alpha * candidate.own + (1 - alpha) * candidate.other
        score = mixed / (len(candidate.tokens) + 1) ** gamma
        # If both networks found it, each is "own" once, and the better score counts.
        best[candidate.tokens] = max(score, best.get(candidate.tokens, -math.inf))
    return [(score, tokens) for tokens, score in sorted(best.items(), key=lambda item: -item[1])]
