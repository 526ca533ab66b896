"""Translating lines: order, batches, empty and long lines."""

import warnings

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
    "the river",
    "7 people wait",
]
OPTIONS = {"beam": 3, "max_length": 8}


@pytest.mark.filterwarnings("ignore:line 3 has")
@pytest.mark.parametrize("max_tokens", [25, 2000])
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


def test_long_lines_are_reported_and_translated(model, vocabulary):
    length = len(vocabulary.encode(LINES[2])) + 1
    for limit, said in (
        (length - 1, rf"line 3 has {length} tokens, max_tokens is {length - 1}"),
        (1, r"line 1 has \d+ tokens and 5 more, max_tokens is 1"),
    ):
        with pytest.warns(UserWarning, match=said):
            got = translate_lines(
                model, vocabulary, LINES, DecodingOptions(max_tokens=limit, **OPTIONS)
            )
        assert len(got) == len(LINES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        translate_lines(model, vocabulary, LINES, DecodingOptions(max_tokens=length, **OPTIONS))
