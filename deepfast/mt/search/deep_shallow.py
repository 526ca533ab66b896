"""Deep-shallow decoding: a grown model and its bottom translate, and each scores both results.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019: the shallow network (the bottom
alone) and the deep one both find n-best translations, and all of them are ranked by

    s(Y) = (alpha * log P_own(Y|X) + (1 - alpha) * log P_other(Y|X)) / |Y|^gamma

where "own" is the network that found Y and |Y| counts eos. `deepfast.mt.search.tuning` finds alpha
and gamma on a dev text. The paper gives no formula; this one is from the authors' script. The
log-probabilities there are means over the tokens, so its ``alpha = 0.5, gamma = -0.4`` is
``alpha = 0.5, gamma = 0.6`` here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from deepfast.mt.models import DepthGrowing
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import Hypothesis, beam_search, score_hypotheses
from deepfast.mt.search.options import DecodingOptions


class Candidate(NamedTuple):
    """A translation and its log-probability by each network."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    own: float
    """log P by the network that found it, eos included."""
    other: float
    """log P by the other one."""


def check_grown(model: SearchModel) -> DepthGrowing:
    """The model, or a ValueError if it has not grown."""
    if not isinstance(model, DepthGrowing):
        raise ValueError(
            "deep-shallow decoding: expected one model of the kind depth_growing, got "
            f"{type(model).__name__}"
        )
    return model


def candidates(
    model: SearchModel, source_BS: Tensor, options: DecodingOptions
) -> list[list[Candidate]]:
    """For each sentence of a batch (B, S) the ``options.beam`` translations of the deep network,
    best first, and then those of its bottom."""
    deep, options = check_grown(model), replace(options, nbest=options.beam)
    results: list[list[Candidate]] = [[] for _ in source_BS]
    for own, other in ((deep, deep.bottom), (deep.bottom, deep)):
        found = beam_search(own, source_BS, options)
        scores = score_hypotheses(other, source_BS, [[h.tokens for h in best] for best in found])
        for result, best, judged in zip(results, found, scores, strict=True):
            for h, score in zip(best, judged, strict=True):
                result.append(Candidate(h.tokens, h.log_prob, score))
    return results


def ranked(found: Sequence[Candidate], alpha: float, gamma: float) -> list[Hypothesis]:
    """The candidates, best first, each text once; of equals the first candidate comes first."""
    best: dict[tuple[int, ...], Hypothesis] = {}
    for tokens, own, other in found:
        score = (alpha * own + (1 - alpha) * other) / (len(tokens) + 1) ** gamma
        # If both networks found it, each is "own" once, and the better score counts.
        if tokens not in best or score > best[tokens].score:
            best[tokens] = Hypothesis(tokens, score, own)
    return sorted(best.values(), key=lambda h: -h.score)
