"""Translating lines: order, batches, empty and long lines."""

import warnings

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.search import (
    DecodingOptions,
    beam_search,
    translate_all,
    translate_lines,
    translate_nbest,
)

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


def one_by_one(model, vocabulary, lines, **options):
    results = []
    for line in lines:
        ids = vocabulary.encode(line)
        source = torch.tensor([[*ids, 3]])
        hypotheses = beam_search(model, source, DecodingOptions(**options))[0] if ids else []
        results.append([(h.score, vocabulary.decode(h.tokens)) for h in hypotheses])
    return results


@pytest.mark.parametrize("max_tokens", [25, 60, 2000])
def test_order_and_scores_are_those_of_lines_alone(model, vocabulary, max_tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = translate_nbest(
            model, vocabulary, LINES, DecodingOptions(max_tokens=max_tokens, nbest=2, **OPTIONS)
        )
    expected = one_by_one(model, vocabulary, LINES, nbest=2, **OPTIONS)
    assert len(got) == len(LINES)
    for line, mine, alone in zip(LINES, got, expected, strict=True):
        if not line.strip():
            assert mine == [(0.0, "")]
        else:
            assert [s for s, _ in mine] == pytest.approx([s for s, _ in alone], abs=1e-4)


def test_lines_are_the_best_of_nbest(model, vocabulary):
    lines = translate_lines(model, vocabulary, LINES, DecodingOptions(**OPTIONS))
    nbest = translate_nbest(model, vocabulary, LINES, DecodingOptions(nbest=3, **OPTIONS))
    assert lines == [best[0][1] for best in nbest]
    assert (lines[1], lines[4]) == ("", "")
    assert [len(best) for best in nbest] == [3, 1, 3, 3, 1, 3, 3, 3]


def test_batches_keep_the_budget(model, vocabulary, monkeypatch):
    shapes = []
    start = model.start
    monkeypatch.setattr(model, "start", lambda s: (shapes.append(tuple(s.shape)), start(s))[1])
    translate_lines(model, vocabulary, LINES, DecodingOptions(max_tokens=64, **OPTIONS))
    assert sum(rows for rows, _ in shapes) == 6
    assert all(rows * width <= 64 for rows, width in shapes)
    assert 1 < len(shapes) < 6


def test_long_lines_are_reported_and_translated(model, vocabulary):
    length = len(vocabulary.encode(LINES[2])) + 1
    with pytest.warns(
        UserWarning, match=rf"line 3 has {length} tokens, max_tokens is {length - 1}"
    ):
        got = translate_lines(
            model, vocabulary, LINES, DecodingOptions(max_tokens=length - 1, **OPTIONS)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(got) == len(
            translate_lines(model, vocabulary, LINES, DecodingOptions(max_tokens=length))
        )
    with pytest.warns(UserWarning, match=r"line 1 has \d+ tokens and 5 more, max_tokens is 1"):
        translate_lines(model, vocabulary, LINES, DecodingOptions(max_tokens=1, **OPTIONS))


def test_nothing_to_translate(model, vocabulary):
    assert translate_lines(model, vocabulary, []) == []
    assert translate_lines(model, vocabulary, ["", " "]) == ["", ""]


def test_errors(model, vocabulary):
    other = Vocabulary.train(["some other text of other words"] * 3, 30)
    with pytest.raises(ValueError, match="of the model's 60 pieces, got 30"):
        translate_lines(model, other, LINES)


def test_tokens_are_counted(model, vocabulary):
    lines = ["the old bridge", "", "we walk home"]
    # eos is forced after four tokens at most, and counts.
    found = translate_all(model, vocabulary, lines, DecodingOptions(beam=2, nbest=2, max_length=4))
    assert [len(best) for best in found.nbest] == [2, 1, 2]
    expected = 0
    for line in (lines[0], lines[2]):
        source = torch.tensor([[*vocabulary.encode(line), vocabulary.eos_id]])
        ((best, *_),) = beam_search(model, source, DecodingOptions(beam=2, max_length=4))
        expected += len(best.tokens) + 1
    assert found.target_tokens == expected
