"""Decoding options: the sentence of every value out of range."""

import math

import pytest

from deepfast.mt.search import DecodingOptions


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"beam": 0}, "beam must be a whole number of at least 1, got 0"),
        ({"beam": 10**9}, "beam must be at most 65536, got 1000000000"),
        ({"beam": 2.0}, "beam must be a whole number of at least 1, got 2.0"),
        ({"nbest": 5}, "nbest must be at most beam 4, got 5"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"length_penalty": -0.1}, "length_penalty must be a number from 0 to 10, got -0.1"),
        ({"length_penalty": math.nan}, "length_penalty must be a number from 0 to 10, got nan"),
        ({"length_penalty": 1e308}, "length_penalty must be a number from 0 to 10, got 1e.308"),
        ({"deep_shallow": True, "alpha": 1.1}, "alpha must be between 0 and 1, got 1.1"),
        ({"deep_shallow": True, "alpha": math.nan}, "alpha must be between 0 and 1, got nan"),
        (
            {"deep_shallow": True, "gamma": math.inf},
            "gamma must be a number from -10 to 10, got inf",
        ),
        ({"length_form": "wu"}, "length_form must be one of gnmt, power, got 'wu'"),
        ({"gamma": 1.0}, "gamma needs deep_shallow, got gamma without it"),
        ({"replace_unknown": True, "no_unknown": True}, "cannot go with no_unknown, got both"),
        ({"replace_unknown": True, "deep_shallow": True}, "cannot go with deep_shallow, got both"),
    ],
)
def test_bad_options(changes, sentence):
    with pytest.raises(ValueError, match=f"decoding: .*{sentence}"):
        DecodingOptions(**changes)
