"""Deep-shallow decoding: the formula, and the order of lines."""

import random

import pytest
import torch

from deepfast.mt.search import DecodingOptions, beam_search, score_hypotheses, translate_nbest
from deepfast.mt.search.deep_shallow import Candidate, ranked

LINES = ["the old bridge", "", "boats", "we walk home"]
OPTIONS = {"beam": 3, "max_length": 6}


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 0.0), (0.3, 1.2), (1.0, -0.4)])
def test_ranked_by_the_formula(alpha, gamma):
    """Of equals the first comes first, and each text is there once, with its better score."""
    generator = random.Random(4)
    found = [
        Candidate(
            tuple(generator.choices(range(4, 7), k=generator.randint(0, 2))),
            -generator.randint(1, 3),
            -generator.randint(1, 3),
        )
        for _ in range(12)
    ]
    scores = {}
    for c in found:
        score = (alpha * c.own + (1 - alpha) * c.other) / (len(c.tokens) + 1) ** gamma
        scores[c.tokens] = max(score, scores.get(c.tokens, score))
    expected = sorted(scores.items(), key=lambda item: -item[1])
    assert [(h.tokens, h.score) for h in ranked(found, alpha, gamma)] == expected
    assert len(scores) < 12


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
