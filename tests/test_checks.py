"""The messages of the checks that all modules share."""

import math

import numpy
import pytest

from deepfast import checks


def test_what_is_right_passes():
    checks.whole("op", 0, 3, rank=0, other=numpy.int64(3))
    checks.number("op", alpha=0.0, gamma=7)
    checks.choice("op", ("a", None), first="a", second=None)
    checks.probability("op", 0)
    checks.probability("op", 1.0)


@pytest.mark.parametrize(("check", "sentence"), [
    (lambda: checks.whole("op", size=0), "op: size must be an integer of at .* 1, got 0"),
    (lambda: checks.whole("op", size=True), "of at least 1, got True"),
    (lambda: checks.whole("op", size=2.0), "of at least 1, got 2.0"),
    (lambda: checks.whole("op", 0, 3, rank=4), "rank must be an integer from 0 to 3, got 4"),
    (lambda: checks.number("op", alpha=-0.1), "alpha must be a number of at least 0, got -0.1"),
    (lambda: checks.number("op", alpha=math.inf), "of at least 0, got inf"),
    (lambda: checks.number("op", alpha="1"), "of at least 0, got '1'"),
    (lambda: checks.positive("op", tau=10**400), "op: tau must fit into 64 bits, got 10+"),
    (lambda: checks.finite("op", "scale", -math.inf), "scale must be a finite .*, got -inf"),
    (lambda: checks.eps("op", math.inf), "eps must be a number of at least 0, got inf"),
    (lambda: checks.probability("op", 1.5, argument="p"), "p must be .* 0 and 1, got 1.5"),
    (lambda: checks.probability("op", math.nan), "between 0 and 1, got nan"),
    (lambda: checks.probability("op", "a"), "between 0 and 1, got 'a'"),
    (lambda: checks.choice("op", ("a", None), kind=numpy.zeros(2)), "one of a, None, got array.*"),
])  # fmt: skip
def test_what_is_wrong_is_a_sentence(check, sentence):
    with pytest.raises(ValueError, match=f"{sentence}$"):
        check()
