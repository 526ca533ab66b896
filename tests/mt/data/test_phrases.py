"""The generated corpus: reproducible, disjoint, balanced, and right where libraries are wrong."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from deepfast.files import MissingPackage
from deepfast.mt.data import phrases

kinds = importlib.import_module("deepfast.mt.data.phrases")
SIZES = {"train": 300, "dev": 30, "test": 60}


@pytest.mark.parametrize("language", kinds.LANGUAGES)
def test_parts(language):
    parts = phrases(language, **SIZES)
    assert {part: len(pairs) for part, pairs in parts.items()} == SIZES
    for side in (0, 1):
        texts = [pair[side].casefold() for pairs in parts.values() for pair in pairs]
        assert len(set(texts)) == len(texts)
    for text in (text for pairs in parts.values() for pair in pairs for text in pair):
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


@pytest.mark.slow
def test_same_in_another_process(python):
    """Each process has other hashes of text."""
    words = "from deepfast.mt.data import phrases; print(phrases('de', train=5, dev=0, test=0))"
    assert python("-c", words).stdout.strip() == str(phrases("de", train=5, dev=0, test=0))


def test_what_is_refused(monkeypatch):
    for missing in ("num2words", "babel.dates"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            kinds.words.cache_clear()
            kinds._months.cache_clear()
            with pytest.raises(MissingPackage, match=r"phrase corpus needs .*deepfast\[train\]"):
                phrases("de", train=100, dev=0, test=0)
    # More pairs than there are.
    monkeypatch.setattr(kinds, "PATIENCE", 5)
    monkeypatch.setitem(kinds.KINDS, "date", lambda *_: ("one", "eins"))
    with pytest.raises(ValueError, match="got 4 pairs and no new phrase of the kind 'date'"):
        phrases("de", train=9, dev=0, test=0)


def test_numbers_in_words():
    for number, language, to, expected in (
        (21_000, "es", "cardinal", "veintiún mil"),
        (101_001, "es", "cardinal", "ciento un mil uno"),
        (1_031_000, "es", "cardinal", "un millón treinta y un mil"),
        (81, "fr", "cardinal", "quatre-vingt-un"),
        (1996, "en", "year", "nineteen ninety-six"),
    ):
        assert kinds.words(number, language, to) == expected


PHRASES = {
    # Kind, the number that is drawn, English -> German, French, Spanish.
    ("date", 327_321, "the fifth of March nineteen ninety-six"): (
        "der fünfte März neunzehnhundertsechsundneunzig",
        "le cinq mars mille neuf cent quatre-vingt-seize",
        "el cinco de marzo de mil novecientos noventa y seis"),
    ("date", 327_317, "the first of March nineteen ninety-six"): (
        "der erste März neunzehnhundertsechsundneunzig",
        "le premier mars mille neuf cent quatre-vingt-seize",
        "el primero de marzo de mil novecientos noventa y seis"),
    ("price", 123450, "€1,234.50"): ("1.234,50 €", "1 234,50 €", "1.234,50 €"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), PHRASES.items(), ids=str)
def test_phrases_of_each_kind(given, expected):
    kind, number, english = given
    draws = SimpleNamespace(
        randrange=lambda *_: number, choice=lambda _: "EUR", choices=lambda *_, **__: [1]
    )
    found = [kinds.KINDS[kind](draws, language) for language in kinds.LANGUAGES]
    assert found == [(english, foreign) for foreign in expected]
