"""Deep-shallow decoding: the formula, and the order of lines."""

import random

import pytest
import torch

from deepfast.mt.search import DecodingOptions, beam_search, score_hypotheses, translate_nbest
from deepfast.mt.search.deep_shallow import Candidate, ranked

LINES = ["the old bridge", "", "boats", "we walk home"]
OPTIONS = {"beam": 3, "max_length": 6}


def test_ranked_by_the_formula():
    generator = random.Random(4)
    found = [
        Candidate(
            tuple(generator.choices(range(4, 7), k=generator.randint(0, 2))),
            -9 * generator.random(),
            -9 * generator.random(),
        )
        for _ in range(12)
    ]
    for alpha, gamma in ((0.0, 0.0), (0.3, 1.2), (1.0, -0.4)):
        scores = {}
        for c in found:
            score = (alpha * c.own + (1 - alpha) * c.other) / (len(c.tokens) + 1) ** gamma
            scores.setdefault(c.tokens, []).append(score)
        best = ranked(found, alpha, gamma)
        assert len(best) == len(scores) < 12
        assert [score for score, _ in best] == sorted(map(max, scores.values()), reverse=True)
        assert all(score == max(scores[tokens]) for score, tokens in best)


def test_of_equals_the_deep_networks_is_first():
    found = [Candidate((5,), -1.0, -1.0), Candidate((4,), -1.0, -1.0)]
    assert [tokens for _, tokens in ranked(found, 0.5, 1.0)] == [(5,), (4,)]


def test_each_judges_the_others_in_the_order_of_lines(grown_model, vocabulary):
    weights = {"deep_shallow": True, "alpha": 0.3, "gamma": 0.8}
    options = DecodingOptions(nbest=2, max_tokens=20, **OPTIONS, **weights)
    got = translate_nbest(grown_model, vocabulary, LINES, options)
    assert got[1] == [(0.0, "", ())]
    differing = 0
    for line, best in zip(LINES, got, strict=True):
        if not line:
            continue
        source = torch.tensor([[*vocabulary.encode(line), 3]])
        scores = {}
        for own, other in ((grown_model, grown_model.bottom), (grown_model.bottom, grown_model)):
            found = beam_search(own, source, DecodingOptions(nbest=3, **OPTIONS))[0]
            for h in found:
                score = 0.3 * h.log_prob + 0.7 * score_hypotheses(other, source, [[h.tokens]])[0][0]
                score /= (len(h.tokens) + 1) ** 0.8
                scores[h.tokens] = max(score, scores.get(h.tokens, score))
            differing += found[0].tokens != best[0].tokens
        expected = sorted(scores.values(), reverse=True)[:2]
        assert [found.score for found in best] == pytest.approx(expected, abs=1e-4)
        assert best[0].score == pytest.approx(scores[best[0].tokens], abs=1e-4)
    # The two networks must disagree here, or the test would show little.
    assert differing > 0
