"""What the functions of search refuse, each with one sentence."""

import math
import re
from functools import partial

import pytest

from deepfast.mt.data import Vocabulary
from deepfast.mt.search import (
    DecodingOptions,
    Ensemble,
    bleu,
    translate_lines,
    tune,
)
from tests.mt.search.conftest import lively

OPTIONS = [
    ({"beam": 0}, "beam: expected an integer of at least 1 and at most 65536, got 0"),
    ({"nbest": 5}, "nbest: expected at most beam 4, got 5"),
    ({"max_length": 0}, "max_length: expected an integer of at least 1 or null, got 0"),
    ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, got 0"),
    ({"length_penalty": -0.1}, "length_penalty: expected a number of at least 0 and at most 10"),
    ({"length_penalty": math.nan}, "length_penalty: expected a number of at least 0 and at most"),
    ({"deep_shallow": True, "alpha": 1.1}, "alpha: expected a number of at least 0 and at most 1,"),
    ({"deep_shallow": True, "gamma": math.inf}, "gamma: expected a number of at least -10 and at"),
    ({"length_form": "wu"}, "length_form: expected one of gnmt, power, got 'wu'"),
    ({"gamma": 1.0}, "gamma: expected deep_shallow beside it, got 1.0"),
    ({"replace_unknown": True, "no_unknown": True}, "expected false with no_unknown or deep_shal"),
    ({"replace_unknown": True, "deep_shallow": True}, "expected false with no_unknown or deep_sh"),
]
SPLIT = {"share_embeddings": "decoder", "vocab_size": 9}
REFUSED = [
    *((partial(DecodingOptions, **options), sentence) for options, sentence in OPTIONS),
    (partial(bleu, ["a", "b"], ["a"]), "got 2 translations and 1 references"),
    (partial(bleu, [], []), "at least one translation, got none"),
    (partial(bleu, ["a"], "text"), "references must be a list of sentences, got 'text'"),
    (partial(bleu, ["a"], [["a"]]), "references must be a list of sentences, got [['a']]"),
    (partial(bleu, [None], ["a"]), "hypotheses must be a list of sentences, got [None]"),
    (partial(bleu, ["a"], ["a"], tokenize="mecab"), "tokenize must be one of 13a, none, intl, "),
    (partial(Ensemble, []), "target_vocab_size, got none"),
    (partial(Ensemble, [lively(60), lively(9)]), "got [(9, 9), (60, 60)]"),
    (partial(Ensemble, [lively(target_vocab_size=10, **SPLIT), lively(9)]),
     "vocab_size and target_vocab_size, got [(9, 9), (9, 10)]"),
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
        (lambda: next(tune(model, vocabulary, ["a"], ["a"], deep)), "_growing, got Transformer"),
        (partial(translate_lines, model, vocabulary, ["a"], deep), "_growing, got Transformer"),
        (partial(translate_lines, Ensemble([model] * 2), vocabulary, ["a"], deep), "got Ensemble"),
        (partial(translate_lines, model, other, ["a"]), "of the model's 60 pieces, got 30"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            call()
