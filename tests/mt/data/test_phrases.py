"""The generated corpus: reproducible, disjoint, balanced, and right where libraries are wrong."""

import datetime
import importlib
import sys
from collections import Counter
from random import Random

import pytest

import deepfast.mt.data
from deepfast.files import MissingPackage
from deepfast.mt.data import phrase_kinds as kinds
from deepfast.mt.data import phrases, read_parallel, write
from deepfast.mt.data.phrases import LANGUAGES, SPLITS, folded

SIZES = {"train": 900, "dev": 90, "test": 180}


@pytest.fixture(scope="module", params=LANGUAGES)
def corpus(request):
    return phrases(request.param, seed=1, **SIZES)


def test_sizes_and_balance(corpus):
    for split, size in SIZES.items():
        assert len(getattr(corpus, split)) == len(corpus.kinds[split]) == size
        assert Counter(corpus.kinds[split]) == dict.fromkeys(kinds.KINDS, size // 9)
    # Shuffled: a prefix of a part holds every kind.
    assert set(corpus.kinds["train"][:100]) == set(kinds.KINDS)


def test_no_source_and_no_target_twice(corpus):
    everything = [pair for split in SPLITS for pair in getattr(corpus, split)]
    for side in (0, 1):
        assert len({folded(pair[side]) for pair in everything}) == len(everything)


def test_text_is_clean(corpus):
    for pair in corpus.train:
        for text in pair:
            assert text == text.strip() == " ".join(text.split())
            assert not {"\u00a0", "\u202f"} & set(text)
            assert 3 <= len(text) <= 120


def test_same_arguments_same_corpus(corpus):
    language = corpus.language
    assert phrases(language, seed=1, **SIZES) == corpus
    other = phrases(language, seed=2, **SIZES)
    assert other.train != corpus.train
    assert other.test != corpus.test


def test_test_part_does_not_depend_on_the_others(corpus):
    small = phrases(corpus.language, seed=1, **SIZES | {"train": 90})
    assert (small.test, small.dev) == (corpus.test, corpus.dev)
    assert phrases(corpus.language, seed=1, train=0, dev=0, test=180).test == corpus.test


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
    words = (
        "from deepfast.mt.data import phrases; print(phrases('de', train=5, dev=0, test=0).train)"
    )
    assert python("-c", words).stdout.strip() == str(phrases("de", train=5, dev=0, test=0).train)


def test_some_kinds():
    corpus = phrases("fr", train=10, dev=1, test=1, kinds=["date", "money"])
    assert Counter(corpus.kinds["train"]) == {"date": 5, "money": 5}


@pytest.mark.parametrize(
    ("language", "arguments", "sentence"),
    [
        ("it", {}, "one of de, fr, es, got 'it'"),
        ("en", {}, "one of de, fr, es, got 'en'"),
        ("de", {"kinds": ["date", "song"]}, "some of number, .*, got song"),
        ("de", {"kinds": []}, "got none"),
        ("de", {"dev": -1}, "dev must be an integer of at least 0, got -1"),
        ("de", {"train": 20_000, "kinds": ["month"]}, "no new phrase of the kind 'month'"),
    ],
)
def test_arguments(language, arguments, sentence, monkeypatch):
    monkeypatch.setattr(sys.modules[phrases.__module__], "PATIENCE", 5)
    with pytest.raises(ValueError, match=sentence):
        phrases(language, **arguments)


def test_write_gives_files_that_read_back(corpus, tmp_path):
    paths = write(corpus, tmp_path / "new" / "folder")
    suffix = corpus.language
    expected = [f"{split}.{side}" for split in SPLITS for side in ("en", suffix)]
    assert [path.name for path in paths] == expected
    for split in SPLITS:
        text = read_parallel(paths[0].parent / f"{split}.en", paths[0].parent / f"{split}.{suffix}")
        assert text.pairs == getattr(corpus, split)


@pytest.mark.parametrize("missing", ["num2words", "babel.dates"])
def test_without_the_packages_the_extra_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    kinds.words.cache_clear()
    with pytest.raises(MissingPackage, match=r"phrase corpus needs .*deepfast\[train\]"):
        phrases("de", train=100, dev=0, test=0)


class Script(Random):
    """A generator whose choices are given: each draw takes the next value."""

    def __init__(self, *values):
        super().__init__(0)
        self.values = list(values)

    def _next(self, *_, **__):
        return self.values.pop(0)

    choice = randrange = random = _next

    def choices(self, *_, **__):
        return [1]


@pytest.mark.parametrize(
    ("number", "to", "language", "expected"),
    [
        (21_000, "cardinal", "es", "veintiún mil"),
        (101_001, "cardinal", "es", "ciento un mil uno"),
        (1_031_000, "cardinal", "es", "un millón treinta y un mil"),
        (11, "ordinal", "es", "undécimo"),
        (412, "ordinal", "es", "cuadringentésimo duodécimo"),
        (745, "ordinal", "es", "septingentésimo cuadragésimo quinto"),
        (800, "ordinal", "es", "octingentésimo"),
        (80, "ordinal", "fr", "quatre-vingtième"),
        (2200, "ordinal", "fr", "deux mille deux centième"),
        (81, "cardinal", "fr", "quatre-vingt-un"),
        (80_200, "cardinal", "fr", "quatre-vingt mille deux cents"),
        (1996, "year", "de", "neunzehnhundertsechsundneunzig"),
        (1996, "year", "en", "nineteen ninety-six"),
    ],
)
def test_words(number, to, language, expected):
    assert kinds.words(number, language, to) == expected


@pytest.mark.parametrize(
    ("language", "value", "noun", "expected"),
    [
        ("de", 3, "house", "das dritte Haus"),
        ("de", 3, "page", "die dritte Seite"),
        ("fr", 1, "page", "la première page"),
        ("fr", 1, "day", "le premier jour"),
        ("fr", 2, "page", "la deuxième page"),
        ("es", 1, "day", "el primer día"),
        ("es", 1, "page", "la primera página"),
        ("es", 3, "train", "el tercer tren"),
        ("es", 4, "train", "el cuarto tren"),
        ("es", 9, "page", "la novena página"),
    ],
)
def test_ordinals_agree_with_their_noun(language, value, noun, expected):
    assert kinds.ordinal(Script(value, noun), language)[1] == expected


FIRST_OF_MARCH = "the first of March nineteen ninety-six"
PHRASES = {
    # Kind, the values that are drawn, English -> German, French, Spanish.
    ("date", ("on",), "on Friday, 1 March 1996"): (
        "am Freitag, 1. März 1996", "le vendredi 1er mars 1996", "el viernes, 1 de marzo de 1996"),
    ("spelled_date", (), FIRST_OF_MARCH): (
        "der erste März neunzehnhundertsechsundneunzig",
        "le premier mars mille neuf cent quatre-vingt-seize",
        "el primero de marzo de mil novecientos noventa y seis"),
    ("time", (1, 5, 15, 0, 0.9, 4), "on Friday at 1:05 am"): (
        "am Freitag um 01:05 Uhr", "vendredi à 01:05", "el viernes a la 1:05"),
    ("time", (1, 5, 15, 0, 0.1), "from 1:05 am to 3:00 pm"): (
        "von 01:05 bis 15:00 Uhr", "de 01:05 à 15:00", "de 1:05 a 15:00"),
    ("money", (1, 1, "EUR"), "one euro and one cent"): (
        "ein Euro und ein Cent", "un euro et un centime", "un euro con un céntimo"),
    ("price", (123450, "EUR"), "€1,234.50"): ("1.234,50 €", "1 234,50 €", "1.234,50 €"),
    ("measure", (125, 10, "length-kilometer"), "12.5 kilometres"): (
        "12,5 Kilometer", "12,5 kilomètres", "12,5 kilómetros"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), PHRASES.items(), ids=str)
def test_phrases_of_each_kind(given, expected, monkeypatch):
    monkeypatch.setattr(kinds, "_date", lambda *_: datetime.date(1996, 3, 1))
    kind, draws, english = given
    found = [kinds.KINDS[kind](Script(*draws), language) for language in LANGUAGES]
    assert found == [(english, foreign) for foreign in expected]
