"""The generated corpus: reproducible, disjoint, balanced, and right where libraries are wrong."""

import importlib
import sys
from random import Random

import pytest

import deepfast.mt.data
from deepfast.files import MissingPackage
from deepfast.mt.data import phrases, read_parallel, write

kinds = importlib.import_module("deepfast.mt.data.phrases")
SIZES = {"train": 300, "dev": 30, "test": 60}


@pytest.fixture(scope="module", params=kinds.LANGUAGES)
def language(request):
    return request.param


def test_parts(language):
    parts = phrases(language, **SIZES)
    assert {part: len(pairs) for part, pairs in parts.items()} == SIZES
    for side in (0, 1):
        folded = [kinds.folded(pair[side]) for pairs in parts.values() for pair in pairs]
        assert len(set(folded)) == len(folded)
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


def test_write_gives_files_that_read_back(language, tmp_path):
    parts = phrases(language, train=9, dev=3, test=0) | {"test": [("a", "b")]}
    write(parts, language, tmp_path / "new" / "folder")
    for part, pairs in parts.items():
        sides = (tmp_path / "new" / "folder" / f"{part}.{side}" for side in ("en", language))
        assert read_parallel(*sides) == pairs


def test_importing_the_corpus_needs_no_optional_package(monkeypatch):
    monkeypatch.setattr(deepfast.mt, "data", deepfast.mt.data)
    for name in [name for name in sys.modules if name.startswith("deepfast.mt.data")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("sentencepiece", "num2words", "babel"):
        monkeypatch.setitem(sys.modules, name, None)
    assert importlib.import_module("deepfast.mt.data").phrases is not phrases


@pytest.mark.exhaustive
def test_same_in_another_process(python):
    """Each process has other hashes of text."""
    words = "from deepfast.mt.data import phrases; print(phrases('de', train=5, dev=0, test=0))"
    assert python("-c", words).stdout.strip() == str(phrases("de", train=5, dev=0, test=0))


@pytest.mark.parametrize(
    ("language", "arguments", "sentence"),
    [
        ("it", {}, "one of de, fr, es, got 'it'"),
        ("en", {}, "one of de, fr, es, got 'en'"),
        ("de", {"dev": -1}, "dev must be an integer of at least 0, got -1"),
    ],
)
def test_arguments(language, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        phrases(language, **arguments)


def test_more_pairs_than_there_are(monkeypatch):
    monkeypatch.setattr(kinds, "PATIENCE", 5)
    monkeypatch.setitem(kinds.KINDS, "date", lambda *_: ("one", "eins"))
    with pytest.raises(ValueError, match="got 4 pairs and no new phrase of the kind 'date'"):
        phrases("de", train=9, dev=0, test=0)


@pytest.mark.parametrize("missing", ["num2words", "babel.dates"])
def test_without_the_packages_the_extra_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    kinds.words.cache_clear()
    kinds._months.cache_clear()
    with pytest.raises(MissingPackage, match=r"phrase corpus needs .*deepfast\[train\]"):
        phrases("de", train=100, dev=0, test=0)


@pytest.mark.parametrize(
    ("number", "to", "language", "expected"),
    [
        (21_000, "cardinal", "es", "veintiún mil"),
        (101_001, "cardinal", "es", "ciento un mil uno"),
        (1_031_000, "cardinal", "es", "un millón treinta y un mil"),
        (81, "cardinal", "fr", "quatre-vingt-un"),
        (1996, "year", "de", "neunzehnhundertsechsundneunzig"),
        (1996, "year", "en", "nineteen ninety-six"),
    ],
)
def test_words(number, to, language, expected):
    assert kinds.words(number, language, to) == expected


class Script(Random):
    """A generator whose draws are given."""

    def __init__(self, *values):
        super().__init__(0)
        self.values = list(values)

    def _next(self, *_, **__):
        return self.values.pop(0)

    choice = randrange = _next

    def choices(self, *_, **__):
        return [1]


PHRASES = {
    # Kind, the values that are drawn, English -> German, French, Spanish.
    ("date", (327_321,), "the fifth of March nineteen ninety-six"): (
        "der fünfte März neunzehnhundertsechsundneunzig",
        "le cinq mars mille neuf cent quatre-vingt-seize",
        "el cinco de marzo de mil novecientos noventa y seis"),
    ("date", (327_317,), "the first of March nineteen ninety-six"): (
        "der erste März neunzehnhundertsechsundneunzig",
        "le premier mars mille neuf cent quatre-vingt-seize",
        "el primero de marzo de mil novecientos noventa y seis"),
    ("price", (123450, "EUR"), "€1,234.50"): ("1.234,50 €", "1 234,50 €", "1.234,50 €"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), PHRASES.items(), ids=str)
def test_phrases_of_each_kind(given, expected):
    kind, draws, english = given
    found = [kinds.KINDS[kind](Script(*draws), language) for language in kinds.LANGUAGES]
    assert found == [(english, foreign) for foreign in expected]
