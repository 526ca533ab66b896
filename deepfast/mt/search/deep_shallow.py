"""Deep-shallow decoding: a grown model and its bottom translate, and each scores both results.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019: the shallow network (the bottom
alone) and the deep one both find n-best translations, and all of them are ranked by

    s(Y) = (alpha * log P_own(Y|X) + (1 - alpha) * log P_other(Y|X)) / |Y|^gamma

where "own" is the network that found Y and |Y| counts eos. alpha and gamma are tuned on a dev text.
The paper gives no formula; this one is from the authors' script. The log-probabilities there are
means over the tokens, so its ``alpha = 0.5, gamma = -0.4`` is ``alpha = 0.5, gamma = 0.6`` here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from deepfast.mt.data.vocabulary import AnyVocabulary
from deepfast.mt.models import kind_of
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search.beam import beam_search, score_hypotheses
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.lines import decode_lines
from deepfast.mt.search.options import DEFAULTS, DecodingOptions
from deepfast.mt.search.score import bleu_against

ALPHA, GAMMA = 0.5, 0.6
"""The weights of the authors' script."""

ALPHAS = tuple(i / 10 for i in range(11))
GAMMAS = tuple(i / 5 for i in range(11))
"""The values that `tune_deep_shallow` tries."""


@dataclass(frozen=True)
class Candidate:
    """A translation and its log-probability by each network."""

    tokens: tuple[int, ...]
    """Token ids, without bos and eos."""
    own: float
    """log P by the network that found it, eos included."""
    other: float
    """log P by the other one."""

    def score(self, alpha: float, gamma: float) -> float:
        """Higher is better."""
        mixed = alpha * self.own + (1 - alpha) * self.other
        return mixed / (len(self.tokens) + 1) ** gamma


@dataclass(frozen=True)
class Candidates:
    """The results of both networks for one sentence, each list best first by its own search."""

    deep: list[Candidate]
    shallow: list[Candidate]

    def ranked(self, alpha: float, gamma: float) -> list[tuple[float, tuple[int, ...]]]:
        """Scores and tokens, best first, each text once; of equals the deep network's is first."""
        best: dict[tuple[int, ...], float] = {}
        for candidate in (*self.deep, *self.shallow):
            score = candidate.score(alpha, gamma)
            # If both networks found it, each is "own" once, and the better score counts.
            best[candidate.tokens] = max(score, best.get(candidate.tokens, -math.inf))
        ranked = sorted(best.items(), key=lambda item: -item[1])
        return [(score, tokens) for tokens, score in ranked]


def line_candidates(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    options: DecodingOptions,
) -> list[Candidates | None]:
    """All ``options.beam`` translations of each network for every line, scored by both; None for a
    line without text.

    Raises:
        ValueError: the model has not grown or is an `Ensemble`, or see `decode_lines`.
    """
    if isinstance(model, Ensemble):
        raise ValueError(
            f"deep-shallow decoding: expected one model of one checkpoint, got {len(model.models)}"
        )
    if not hasattr(model, "bottom"):
        raise ValueError(
            "deep-shallow decoding: expected a model of the kind depth_growing, got "
            f"{kind_of(model.config)}"
        )
    bottom, ids = model.bottom, vocabulary.search_ids()
    options = replace(options, nbest=options.beam)

    def found(own: SearchModel, other: SearchModel, source_BS: Tensor) -> list[list[Candidate]]:
        hypotheses = beam_search(own, source_BS, options, **ids)
        tokens = [[h.tokens for h in best] for best in hypotheses]
        scores = score_hypotheses(
            other, source_BS, tokens, bos_id=vocabulary.bos_id, eos_id=vocabulary.eos_id
        )
        return [
            [Candidate(h.tokens, h.log_prob, score) for h, score in zip(*pair, strict=True)]
            for pair in zip(hypotheses, scores, strict=True)
        ]

    def decode(source_BS: Tensor) -> list[Candidates]:
        deep, shallow = found(model, bottom, source_BS), found(bottom, model, source_BS)
        return [Candidates(*pair) for pair in zip(deep, shallow, strict=True)]

    return decode_lines(model, vocabulary, lines, decode, max_tokens=options.max_tokens)


@dataclass(frozen=True)
class Tuned:
    """The best alpha and gamma for a text, and what they gain; cased BLEU, 0 to 100."""

    alpha: float
    gamma: float
    bleu: float
    deep: float
    """BLEU of the deep network alone."""
    shallow: float
    """BLEU of the bottom alone."""


def tune_deep_shallow(
    model: SearchModel,
    vocabulary: AnyVocabulary,
    lines: Sequence[str],
    references: Sequence[str],
    options: DecodingOptions = DEFAULTS,
    *,
    alphas: Sequence[float] = ALPHAS,
    gammas: Sequence[float] = GAMMAS,
) -> Tuned:
    """Tries every pair of alpha and gamma on a dev text; each network searches once.

    Of pairs that are equally good the one nearest to `ALPHA` and `GAMMA` is taken.

    Args:
        lines, references: the text and its translation, line by line.
        alphas, gammas: values to try.
        model, vocabulary, options: see `translate_all`; alpha, gamma and nbest are not read.

    Raises:
        ValueError: the counts differ, there is nothing to translate, or a model that has not grown.
    """
    if len(lines) != len(references) or not lines:
        raise ValueError(
            f"expected as many references as lines, at least one, got {len(lines)} lines "
            f"and {len(references)} references"
        )
    score = bleu_against(references)
    found = line_candidates(model, vocabulary, lines, options)
    known: dict[tuple[tuple[int, ...], ...], float] = {}

    def bleu(chosen: Sequence[tuple[int, ...]]) -> float:
        # Most pairs of alpha and gamma choose the same translations.
        if (key := tuple(chosen)) not in known:
            known[key] = score([vocabulary.decode(tokens) for tokens in chosen])
        return known[key]

    pairs = sorted(
        ((alpha, gamma) for alpha in alphas for gamma in gammas),
        key=lambda pair: abs(pair[0] - ALPHA) + abs(pair[1] - GAMMA),
    )
    results = [
        bleu([() if c is None else c.ranked(alpha, gamma)[0][1] for c in found])
        for alpha, gamma in pairs
    ]
    best = max(results)
    alpha, gamma = pairs[results.index(best)]
    deep, shallow = (
        bleu([() if c is None else getattr(c, side)[0].tokens for c in found])
        for side in ("deep", "shallow")
    )
    return Tuned(alpha, gamma, best, deep, shallow)
