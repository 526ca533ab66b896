"""What the functions of search refuse, each with one sentence."""

import math
import re
from functools import partial

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.search import (
    DecodingOptions,
    Ensemble,
    beam_search,
    bleu,
    bleu_by_length,
    score_hypotheses,
    translate_lines,
    tune,
)
from tests.mt.search.conftest import lively

SOURCE = torch.tensor([[5, 6, 7, 3], [8, 4, 3, 0], [7, 3, 0, 0]])
search, force = partial(beam_search, lively()), partial(score_hypotheses, lively())
bounded = partial(bleu_by_length, ["a"], ["b"], ["b"])

OPTIONS = [
    ({"beam": 0}, "beam must be an integer of at least 1, got 0"),
    ({"beam": 10**9}, "beam must be at most 65536, got 1000000000"),
    ({"beam": 2.0}, "beam must be an integer of at least 1, got 2.0"),
    ({"nbest": 5}, "nbest must be at most beam 4, got 5"),
    ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
    ({"length_penalty": -0.1}, "length_penalty must be a number from 0 to 10, got -0.1"),
    ({"length_penalty": math.nan}, "length_penalty must be a number from 0 to 10, got nan"),
    ({"deep_shallow": True, "alpha": 1.1}, "alpha must be between 0 and 1, got 1.1"),
    ({"deep_shallow": True, "alpha": math.nan}, "alpha must be between 0 and 1, got nan"),
    ({"deep_shallow": True, "gamma": math.inf}, "gamma must be a number from -10 to 10, got inf"),
    ({"length_form": "wu"}, "length_form must be one of gnmt, power, got 'wu'"),
    ({"gamma": 1.0}, "alpha and gamma need deep_shallow, got them without it"),
    ({"replace_unknown": True, "no_unknown": True}, "cannot go with no_unknown, got both"),
    ({"replace_unknown": True, "deep_shallow": True}, "cannot go with deep_shallow, got both"),
]
SPLIT = {"share_embeddings": "decoder", "vocab_size": 9}
REFUSED = [
    *((partial(DecodingOptions, **options), sentence) for options, sentence in OPTIONS),
    (partial(search, SOURCE[0]), "source must be int64 (B, S), got torch.int64 (4,)"),
    (partial(search, [[5, 3]]), "source must be int64 (B, S), got list"),
    (partial(search, SOURCE.int()), "source must be int64 (B, S), got torch.int32"),
    (partial(search, SOURCE * (SOURCE != 7)[:, :1]), "got only padding in sentence 2"),
    (partial(search, SOURCE[:, :0]), "got only padding in sentence 0"),
    (partial(force, SOURCE, [[], []]), "expected translations of 3 sentences, got 2"),
    (partial(bleu, ["a", "b"], ["a"]), "got 2 translations and 1 references"),
    (partial(bleu, [], []), "at least one translation, got none"),
    (partial(bleu, ["a"], "text"), "references must be a list of sentences, got str"),
    (partial(bleu, ["a"], [["a"]]), "references must be a list of sentences, got one with a list"),
    (partial(bleu, [None], ["a"]), "hypotheses must be a list of sentences, got one with a None"),
    (partial(bleu, ["a"], None), "references must be a list of sentences, got NoneType"),
    (partial(bleu, iter(["a"]), ["a"]), "hypotheses must be a list of sentences, got list_iter"),
    (partial(bleu, ["a"], ["a"], tokenize="mecab"), "tokenize must be one of 13a, none, intl, "),
    *((partial(bounded, bounds), "by_length: expected rising integ")
      for bounds in ([], [0], [3, 3], [5, 3], [-1, 3])),
    (partial(Ensemble, []), "padding_idx, got none"),
    (partial(Ensemble, [lively(60), lively(9)]), "got [(9, 9, 0), (60, 60, 0)]"),
    (partial(Ensemble, [lively(target_vocab_size=10, **SPLIT), lively(9)]),
     "target_vocab_size and padding_idx, got [(9, 9, 0), (9, 10, 0)]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


def test_refused_for_these_models(model, vocabulary):
    other = Vocabulary.train(["some other text of other words"] * 3, 30)
    deep = DecodingOptions(deep_shallow=True)
    for call, sentence in (
        (lambda: next(tune(model, vocabulary, ["a", "b"], ["a"])), "got 2 lines and 1 references"),
        (lambda: next(tune(model, vocabulary, [], [])), "at least one, got 0 lines"),
        (lambda: next(tune(model, vocabulary, ["a"], ["a"], deep)), "_growing, got transformer"),
        (partial(translate_lines, model, vocabulary, ["a"], deep), "_growing, got transformer"),
        (partial(translate_lines, Ensemble([model] * 2), vocabulary, ["a"], deep), "got 2 models"),
        (partial(translate_lines, model, other, ["a"]), "of the model's 60 pieces, got 30"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            call()


def test_nothing_to_translate_or_to_score(model, vocabulary):
    assert translate_lines(model, vocabulary, []) == []
    assert translate_lines(model, vocabulary, ["", " "]) == ["", ""]
    assert search(torch.zeros(0, 4, dtype=torch.int64)) == []
    assert force(SOURCE, [[], [], []]) == [[], [], []]
    assert force(SOURCE[:0], []) == []
