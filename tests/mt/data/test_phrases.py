"""The generated corpus: reproducible, disjoint, balanced, and right where libraries are wrong."""

import importlib
from types import SimpleNamespace

import pytest

from deepfast.mt.data import phrases

kinds = importlib.import_module("deepfast.mt.data.phrases")
SIZES = {"train": 300, "dev": 30, "test": 60}


@pytest.mark.parametrize("language", kinds.LANGUAGES)
def test_parts(language):
    parts = phrases(language, **SIZES)
    assert {part: len(pairs) for part, pairs in parts.items()} == SIZES
    for side in (0, 1):
        texts = [pair[side] for pairs in parts.values() for pair in pairs]
        assert len({text.casefold() for text in texts}) == len(texts)
        for text in texts:
            assert text == " ".join(text.split())
            assert not {"\u00a0", "\u202f"} & set(text)
    assert sum(pair[0][0] in "€U" for pair in parts["train"]) == 100
    assert phrases(language, **SIZES) == parts
    other = phrases(language, seed=2, **SIZES)
    assert all(other[part] != parts[part] for part in parts)
    # The test part does not depend on the others, nor the dev part on the training part.
    small = phrases(language, **SIZES | {"train": 90})
    assert (small["test"], small["dev"]) == (parts["test"], parts["dev"])
    assert phrases(language, train=0, dev=0, test=60)["test"] == parts["test"]


def test_more_pairs_than_there_are(monkeypatch):
    monkeypatch.setattr(kinds, "PATIENCE", 5)
    monkeypatch.setitem(kinds.KINDS, "date", lambda *_: ("one", "eins"))
    with pytest.raises(ValueError, match="got 4 pairs and no new phrase of the kind 'date'"):
        phrases("de", train=9, dev=0, test=0)


def test_thousands_in_spanish():
    for number, expected in (
        (21_000, "veintiún mil"),
        (101_001, "ciento un mil uno"),
        (1_031_000, "un millón treinta y un mil"),
    ):
        assert kinds.words(number, "es") == expected


@pytest.mark.parametrize(("kind", "number", "expected"), [
    ("date", 327_321, [
        "the fifth of March nineteen ninety-six", "der fünfte März neunzehnhundertsechsundneunzig",
        "le cinq mars mille neuf cent quatre-vingt-seize",
        "el cinco de marzo de mil novecientos noventa y seis"]),
    ("date", 327_317, [
        "the first of March nineteen ninety-six", "der erste März neunzehnhundertsechsundneunzig",
        "le premier mars mille neuf cent quatre-vingt-seize",
        "el primero de marzo de mil novecientos noventa y seis"]),
    ("price", 123450, ["€1,234.50", "1.234,50 €", "1 234,50 €", "1.234,50 €"]),
])  # fmt: skip
def test_phrases_of_the_number_that_is_drawn(kind, number, expected):
    """In English, German, French and Spanish."""
    draws = SimpleNamespace(
        randrange=lambda *_: number, choice=lambda _: "EUR", choices=lambda *_, **__: [1]
    )
    pairs = [kinds.KINDS[kind](draws, language) for language in kinds.LANGUAGES]
    assert [pairs[0][0], *(foreign for _, foreign in pairs)] == expected
