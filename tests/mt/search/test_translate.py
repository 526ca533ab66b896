"""Translating lines: their order, and batches."""

import pytest
import torch

from deepfast.mt.search import DecodingOptions, beam_search, translate_lines, translate_nbest

LINES = [
    "the old bridge",
    "",
    "a small house stands by the river and she reads a long book",
    "boats",
    "   ",
    "we walk home",
    "7 people wait",
]
OPTIONS = {"beam": 3, "max_length": 8}


@pytest.mark.parametrize("max_tokens", [1, 25, 2000])
def test_order_and_scores_are_those_of_lines_alone(model, vocabulary, max_tokens):
    options = DecodingOptions(max_tokens=max_tokens, nbest=2, **OPTIONS)
    found = translate_nbest(model, vocabulary, LINES, options)
    for line, mine in zip(LINES, found, strict=True):
        if not line.strip():
            assert mine == [(0.0, "", ())]
            continue
        source = torch.tensor([[*vocabulary.encode(line), vocabulary.eos_id]])
        (alone,) = beam_search(model, source, DecodingOptions(nbest=2, **OPTIONS))
        assert [best.score for best in mine] == pytest.approx([h.score for h in alone], abs=1e-4)
        assert mine[0].tokens == alone[0].tokens
        assert mine[0].text == vocabulary.decode(alone[0].tokens)
    lines = translate_lines(model, vocabulary, LINES, options)
    assert lines == [best[0].text for best in found]
