"""Deep-shallow decoding: a grown model and its bottom translate, and each judges the other.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019: the shallow network (the bottom
alone) and the deep one both find n-best translations, and all of them are ranked by

    s(Y) = (alpha * log P_own(Y|X) + (1 - alpha) * log P_other(Y|X)) / |Y|^gamma

where "own" is the network that found Y and |Y| counts eos. alpha and gamma are tuned on a dev text.
The paper gives no formula; this is the authors' script, whose log-probabilities are means over the
tokens: its ``alpha = 0.5, gamma = -0.4`` is ``gamma = 0.6`` here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from deepfast.mt.data import TokenVocabulary, Vocabulary
from deepfast.mt.data.vocabulary import BOS, EOS
from deepfast.mt.models import kind_of
from deepfast.mt.search.beam import beam_search
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.forced import score_hypotheses
from deepfast.mt.search.score import bleu_against
from deepfast.mt.search.translate import decode_lines

ALPHA, GAMMA = 0.5, 0.6
"""As in the authors' script."""

ALPHAS = tuple(i / 10 for i in range(11))
GAMMAS = tuple(i / 5 for i in range(11))
"""What `tune` tries."""


@dataclass(frozen=True)
class Candidate:
    """A translation and what both networks think of it."""

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
    """What both networks found for one sentence, each best first by its own search."""

    deep: list[Candidate]
    shallow: list[Candidate]

    def ranked(self, alpha: float, gamma: float) -> list[tuple[float, tuple[int, ...]]]:
        """Scores and tokens, best first; of equal ones the deep network's first, each text once."""
        best: dict[tuple[int, ...], float] = {}
        for candidate in (*self.deep, *self.shallow):
            score = candidate.score(alpha, gamma)
            # Both may have found it: then "own" is each of them once, and the better one counts.
            best[candidate.tokens] = max(score, best.get(candidate.tokens, -math.inf))
        ranked = sorted(best.items(), key=lambda item: -item[1])
        return [(score, tokens) for tokens, score in ranked]


def deep_shallow_candidates(
    model: nn.Module,
    source_BS: Tensor,
    *,
    beam: int = 4,
    bos_id: int = BOS,
    eos_id: int = EOS,
    **options,
) -> list[Candidates]:
    """All ``beam`` translations of each network for every sentence, scored by both.

    Args:
        model: one that has grown: `deepfast.mt.models.DepthGrowing`.
        source_BS: (B, S) int64, each sentence with its eos.
        beam: hypotheses kept, and translations taken, per network.
        bos_id, eos_id, options: see `beam_search`.

    Raises:
        ValueError: the model has not grown or is an `Ensemble`, or see `beam_search`.
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

    ids = {"bos_id": bos_id, "eos_id": eos_id}

    def found(own: nn.Module, other: nn.Module) -> list[list[Candidate]]:
        hypotheses = beam_search(own, source_BS, beam=beam, nbest=beam, **ids, **options)
        tokens = [[h.tokens for h in best] for best in hypotheses]
        scores = score_hypotheses(other, source_BS, tokens, **ids)
        return [
            [Candidate(h.tokens, h.log_prob, score) for h, score in zip(*pair, strict=True)]
            for pair in zip(hypotheses, scores, strict=True)
        ]

    pairs = zip(found(model, model.bottom), found(model.bottom, model), strict=True)
    return [Candidates(deep, shallow) for deep, shallow in pairs]


def _of_lines(
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    max_tokens: int,
    **options,
) -> list[Candidates | None]:
    """The candidates of every line; None for one without text."""
    ids = {name: getattr(vocabulary, name) for name in ("bos_id", "eos_id", "unk_id")}
    return decode_lines(
        model,
        vocabulary,
        lines,
        lambda source_BS: deep_shallow_candidates(model, source_BS, **ids, **options),
        max_tokens=max_tokens,
    )


def deep_shallow_nbest(
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    *,
    alpha: float = ALPHA,
    gamma: float = GAMMA,
    beam: int = 4,
    nbest: int = 1,
    max_tokens: int = 2000,
    **options,
) -> list[list[tuple[float, str]]]:
    """As `translate_nbest`, by both networks of a model that has grown.

    Args:
        alpha: weight, 0 to 1, of the network that found a translation; the other has the rest.
        gamma: power of the length, in tokens, that divides; higher is longer.
        beam: hypotheses kept, and translations taken, per network.
        model, vocabulary, lines, nbest, max_tokens, options: see `translate_nbest`.

    Raises:
        ValueError: an argument out of range, or a model that has not grown.
        RuntimeError: see `beam_search`.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"deep-shallow decoding: alpha must be from 0 to 1, got {alpha}")
    if not math.isfinite(gamma):
        raise ValueError(f"deep-shallow decoding: gamma must be a finite number, got {gamma}")
    if not 1 <= nbest <= beam:
        raise ValueError(f"deep-shallow decoding: nbest must be 1 to beam {beam}, got {nbest}")
    found = _of_lines(model, vocabulary, lines, max_tokens, beam=beam, **options)
    return [
        [(0.0, "")]
        if candidates is None
        else [(s, vocabulary.decode(t)) for s, t in candidates.ranked(alpha, gamma)[:nbest]]
        for candidates in found
    ]


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
    model: nn.Module,
    vocabulary: Vocabulary | TokenVocabulary,
    lines: Sequence[str],
    references: Sequence[str],
    *,
    alphas: Sequence[float] = ALPHAS,
    gammas: Sequence[float] = GAMMAS,
    max_tokens: int = 2000,
    **options,
) -> Tuned:
    """Tries every pair of alpha and gamma on a dev text; each network searches once.

    Of pairs that are equally good the one nearest to `ALPHA` and `GAMMA` is taken.

    Args:
        lines, references: the text and its translation, line by line.
        alphas, gammas: values to try.
        model, vocabulary, max_tokens, options: see `deep_shallow_nbest`.

    Raises:
        ValueError: the counts differ, there is nothing to translate, or see `deep_shallow_nbest`.
    """
    if len(lines) != len(references) or not lines:
        raise ValueError(
            f"expected as many references as lines, at least one, got {len(lines)} lines "
            f"and {len(references)} references"
        )
    score = bleu_against(references)
    found = _of_lines(model, vocabulary, lines, max_tokens, **options)
    known: dict[tuple[tuple[int, ...], ...], float] = {}

    def bleu(chosen: Sequence[tuple[int, ...]]) -> float:
        # Most pairs choose alike.
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
