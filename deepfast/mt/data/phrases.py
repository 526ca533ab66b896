"""A corpus that needs no download: English numbers, dates and prices with their translation.

Every phrase has exactly one translation. The numbers inside make the supply almost endless.
No phrase of the dev or test part occurs in training.
"""

from __future__ import annotations

import datetime
import itertools
from functools import lru_cache
from random import Random
from typing import Any

from deepfast import checks
from deepfast.files import DataError, require

LANGUAGES = ("de", "fr", "es")
PARTS = ("train", "dev", "test")
# The locale of each side. British English puts the day before the month, as the others do.
LOCALES = {"en": "en_GB", "de": "de_DE", "fr": "fr_FR", "es": "es_ES"}
DATES = {"de": "der {} {} {}", "fr": "le {} {} {}", "es": "el {} de {} de {}"}
# A kind has no more phrases when this many draws in a row gave no new one.
PATIENCE = 1000

Pair = tuple[str, str]


@lru_cache(maxsize=1 << 16)
def words(number: int, language: str, to: str = "cardinal") -> str:
    """A number in words; `to` is `cardinal`, `ordinal` or `year`."""
    text = _package("num2words").num2words(number, lang=language, to=to)
    # num2words counts thousands wrong in Spanish.
    if language == "es" and to != "ordinal":
        text = text.replace("veintiuno mil", "veintiún mil").replace("uno mil", "un mil")
    return text


def number(random: Random, language: str) -> Pair:
    """`four thousand, two hundred and seven`"""
    value = _digits(random, 7)
    return words(value, "en"), words(value, language)


def date(random: Random, language: str) -> Pair:
    """`the third of May nineteen ninety-six`"""
    day = datetime.date(1100, 1, 1) + datetime.timedelta(random.randrange(1000 * 365))
    first = "ordinal" if language == "de" or day.day == 1 else "cardinal"
    english = f"the {words(day.day, 'en', 'ordinal')} of {_months('en')[day.month]}"
    foreign = DATES[language].format(
        words(day.day, language, first),
        _months(language)[day.month],
        words(day.year, language, "year"),
    )
    return f"{english} {words(day.year, 'en', 'year')}", foreign


def price(random: Random, language: str) -> Pair:
    """`€1,234.50`"""
    amount, currency = _digits(random, 6) / 100, random.choice(("EUR", "USD"))
    form = _package("babel.numbers").format_currency
    source, target = (form(amount, currency, locale=LOCALES[x]) for x in ("en", language))
    # Babel writes no-break spaces.
    return source, target.replace("\u202f", " ").replace("\u00a0", " ")


KINDS = {kind.__name__: kind for kind in (number, date, price)}


def phrases(
    language: str, *, seed: int = 1, train: int = 30_000, dev: int = 500, test: int = 1_000
) -> dict[str, list[Pair]]:
    """Generate phrases in English and their translation.

    The result depends only on the arguments. The test part does not depend on `dev` or `train`, and
    the dev part not on `train`, so that runs with more or less training text are comparable. Over
    all three parts no two pairs share a source or a target.

    Args:
        language: `de`, `fr` or `es`.
        train, dev, test: pairs of each part, shared evenly among the kinds.

    Returns:
        Part ("train", "dev", "test") -> (English, foreign) pairs.

    Raises:
        ValueError: an unknown language.
        DataError: more pairs than there are phrases.
        MissingPackage: num2words or Babel is not installed.
    """
    checks.choice("phrases", LANGUAGES, language=language)
    counts = {"train": train, "dev": dev, "test": test}
    randoms = {kind: Random(f"deepfast phrases {seed} {language} {kind}") for kind in KINDS}
    seen: tuple[set[str], set[str]] = set(), set()
    parts: dict[str, list[Pair]] = {}
    # The test part is drawn first, so that the sizes of the others cannot change it.
    for part in reversed(PARTS):
        kinds = itertools.islice(itertools.cycle(KINDS), counts[part])
        parts[part] = [_new(kind, randoms[kind], language, seen) for kind in kinds]
    return {part: parts[part] for part in PARTS}


def _new(kind: str, random: Random, language: str, seen: tuple[set[str], set[str]]) -> Pair:
    for _ in range(PATIENCE):
        pair = KINDS[kind](random, language)
        if not any(text in known for text, known in zip(pair, seen, strict=True)):
            for text, known in zip(pair, seen, strict=True):
                known.add(text)
            return pair
    raise DataError(
        f"phrases: expected fewer pairs, got {len(seen[0])} pairs and no new phrase of the kind "
        f"{kind!r}"
    )


def _digits(random: Random, most: int) -> int:
    """A number of 1 to `most` digits; longer ones more often, because short ones are few."""
    count = random.choices(range(1, most + 1), weights=range(1, most + 1))[0]
    return random.randrange(10 ** (count - 1), 10**count)


@lru_cache
def _months(language: str) -> dict[int, str]:
    return dict(_package("babel.dates").get_month_names("wide", locale=LOCALES[language]))


def _package(name: str) -> Any:
    return require(name, "the phrase corpus")
