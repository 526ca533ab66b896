"""The kinds of phrases of the generated corpus: numbers, dates and amounts, spelled or in figures.

The words come from num2words and from Babel's CLDR tables. The tables and corrections below replace
what a library does wrong or has no rule for: num2words writes French `deux centsième`, Spanish
`quadragésimo` and `veintiuno mil`, English `two euro`; CLDR has no French `1er mai`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import lru_cache
from random import Random

from deepfast.files import require

Pair = tuple[str, str]

# The locale of each side. British English puts the day before the month, as the others do.
LOCALES = {"en": "en_GB", "de": "de_DE", "fr": "fr_FR", "es": "es_ES"}

SPANISH_ORDINALS = {
    "décimoprimero": "undécimo",
    "décimosegundo": "duodécimo",
    "quadragésimo": "cuadragésimo",
    "cuadrigentésimo": "cuadringentésimo",
    "septigentésimo": "septingentésimo",
    "octigentésimo": "octingentésimo",
}

# English noun -> noun and gender in each other language.
NOUNS: dict[str, dict[str, tuple[str, str]]] = {
    "day": {"de": ("Tag", "m"), "fr": ("jour", "m"), "es": ("día", "m")},
    "page": {"de": ("Seite", "f"), "fr": ("page", "f"), "es": ("página", "f")},
    "book": {"de": ("Buch", "n"), "fr": ("livre", "m"), "es": ("libro", "m")},
    "city": {"de": ("Stadt", "f"), "fr": ("ville", "f"), "es": ("ciudad", "f")},
    "house": {"de": ("Haus", "n"), "fr": ("maison", "f"), "es": ("casa", "f")},
    "train": {"de": ("Zug", "m"), "fr": ("train", "m"), "es": ("tren", "m")},
    "question": {"de": ("Frage", "f"), "fr": ("question", "f"), "es": ("pregunta", "f")},
    "chapter": {"de": ("Kapitel", "n"), "fr": ("chapitre", "m"), "es": ("capítulo", "m")},
}
ARTICLES = {
    "de": {"m": "der", "f": "die", "n": "das"},
    "fr": {"m": "le", "f": "la"},
    "es": {"m": "el", "f": "la"},
}

# English preposition -> the words before a full date, and below before a month.
BEFORE_DATE = {
    "on": {"de": "am {}", "fr": "le {}", "es": "el {}"},
    "since": {"de": "seit {}", "fr": "depuis le {}", "es": "desde el {}"},
    "until": {"de": "bis {}", "fr": "jusqu'au {}", "es": "hasta el {}"},
}
BEFORE_MONTH = {
    "in": {"de": "im {}", "fr": "en {}", "es": "en {}"},
    "since": {"de": "seit {}", "fr": "depuis {}", "es": "desde {}"},
    "until": {"de": "bis {}", "fr": "jusqu'en {}", "es": "hasta {}"},
}
# French `le vendredi` would mean every Friday.
AT_TIME = {"en": "on {} at {}", "de": "am {} um {} Uhr", "fr": "{} à {}", "es": "el {} a las {}"}
TIME_SPAN = {
    "en": "from {} to {}",
    "de": "von {} bis {} Uhr",
    "fr": "de {} à {}",
    "es": "de {} a {}",
}

UNITS = ("length-kilometer", "length-meter", "mass-kilogram", "mass-gram", "volume-liter")
MONEY = {"EUR": ("euro", "cent"), "USD": ("dollar", "cent")}


@lru_cache(maxsize=1 << 16)
def words(number: int, language: str, to: str = "cardinal") -> str:
    """A number in words; `to` is `cardinal`, `ordinal` or `year`."""
    text = require("num2words", "the phrase corpus").num2words(number, lang=language, to=to)
    if language == "fr" and to == "ordinal":
        text = text.replace("centsième", "centième").replace("vingtsième", "vingtième")
    if language == "es" and to == "ordinal":
        for wrong, right in SPANISH_ORDINALS.items():
            text = text.replace(wrong, right)
    if language == "es" and to != "ordinal":
        text = text.replace("veintiuno mil", "veintiún mil").replace("uno mil", "un mil")
    return text


def _digits(random: Random, most: int) -> int:
    """A number of 1 to `most` digits; longer ones more often, because short ones are few."""
    count = random.choices(range(1, most + 1), weights=range(1, most + 1))[0]
    return random.randrange(10 ** (count - 1), 10**count)


def number(random: Random, language: str) -> Pair:
    """`four thousand, two hundred and seven`"""
    value = _digits(random, 7)
    return words(value, "en"), words(value, language)


def ordinal(random: Random, language: str) -> Pair:
    """`the forty-second page`"""
    value, english = _digits(random, 4), random.choice(list(NOUNS))
    noun, gender = NOUNS[english][language]
    text = words(value, language, "ordinal")
    if language == "fr" and gender == "f" and value == 1:
        text = "première"
    if language == "es" and gender == "f":
        text = " ".join(word.removesuffix("o") + "a" for word in text.split())
    elif language == "es" and text.endswith(("primero", "tercero")):
        text = text.removesuffix("o")
    source = f"the {words(value, 'en', 'ordinal')} {english}"
    return source, f"{ARTICLES[language][gender]} {text} {noun}"


def month(random: Random, language: str) -> Pair:
    """`since May nineteen ninety-six`"""
    year, index = random.randrange(1100, 2100), random.randrange(1, 13)
    preposition = random.choice(list(BEFORE_MONTH))
    between = " de " if language == "es" else " "
    foreign = _names("month", language)[index] + between + words(year, language, "year")
    return (
        f"{preposition} {_names('month', 'en')[index]} {words(year, 'en', 'year')}",
        BEFORE_MONTH[preposition][language].format(foreign),
    )


def spelled_date(random: Random, language: str) -> Pair:
    """`the third of May nineteen ninety-six`"""
    date = _date(random, 1100, 2100)
    year = words(date.year, language, "year")
    name = _names("month", language)[date.month]
    day = words(date.day, language, "ordinal" if language == "de" or date.day == 1 else "cardinal")
    foreign = {
        "de": f"der {day} {name} {year}",
        "fr": f"le {day} {name} {year}",
        "es": f"el {day} de {name} de {year}",
    }[language]
    english = f"the {words(date.day, 'en', 'ordinal')} of {_names('month', 'en')[date.month]}"
    return f"{english} {words(date.year, 'en', 'year')}", foreign


def date(random: Random, language: str) -> Pair:
    """`on Friday, 3 May 1996`"""
    day, preposition = _date(random, 1900, 2100), random.choice(list(BEFORE_DATE))
    full = require("babel.dates", "the phrase corpus").format_date
    foreign = full(day, "full", locale=LOCALES[language])
    if language == "fr" and day.day == 1:
        foreign = foreign.replace(" 1 ", " 1er ")
    return (
        f"{preposition} {full(day, 'full', locale=LOCALES['en'])}",
        BEFORE_DATE[preposition][language].format(foreign),
    )


def time(random: Random, language: str) -> Pair:
    """`on Friday at 3:07 pm`, `from 9:15 am to 3:07 pm`"""
    moments = [datetime.time(random.randrange(24), random.randrange(60)) for _ in range(2)]
    clock = require("babel.dates", "the phrase corpus").format_time
    left = [_plain(clock(moment, "h:mm a", locale=LOCALES["en"])) for moment in moments]
    right = [_plain(clock(moment, "short", locale=LOCALES[language])) for moment in moments]
    if random.random() < 0.5:
        return TIME_SPAN["en"].format(*left), TIME_SPAN[language].format(*right)
    weekday = random.randrange(7)
    target = AT_TIME[language].format(_names("day", language)[weekday], right[0])
    if moments[0].hour == 1:
        # One o'clock is the only hour in the singular.
        target = target.replace(" a las ", " a la ")
    return AT_TIME["en"].format(_names("day", "en")[weekday], left[0]), target


def money(random: Random, language: str) -> Pair:
    """`forty-two euros and seven cents`"""
    whole, hundredths = _digits(random, 4), random.randrange(1, 100)
    currency = random.choice(list(MONEY))
    unit, cent = MONEY[currency]
    units, cents = (name + "s" * (n != 1) for name, n in ((unit, whole), (cent, hundredths)))
    source = f"{words(whole, 'en')} {units} and {words(hundredths, 'en')} {cents}"
    convert = require("num2words", "the phrase corpus").num2words
    # As a string: num2words reads an integer as hundredths, and a float would round.
    amount = f"{whole}.{hundredths:02d}"
    return source, convert(amount, lang=language, to="currency", currency=currency)


def price(random: Random, language: str) -> Pair:
    """`€1,234.50`"""
    amount, currency = _digits(random, 6) / 100, random.choice(list(MONEY))
    form = require("babel.numbers", "the phrase corpus").format_currency
    source, target = (form(amount, currency, locale=LOCALES[x]) for x in ("en", language))
    return _plain(source), _plain(target)


def measure(random: Random, language: str) -> Pair:
    """`12.5 kilometres`"""
    value, unit = _digits(random, 5) / random.choice((1, 10)), random.choice(UNITS)
    form = require("babel.units", "the phrase corpus").format_unit
    source, target = (form(value, unit, "long", locale=LOCALES[x]) for x in ("en", language))
    return _plain(source), _plain(target)


KINDS: dict[str, Callable[[Random, str], Pair]] = {
    kind.__name__: kind
    for kind in (number, ordinal, month, spelled_date, date, time, money, price, measure)
}


def _date(random: Random, first: int, end: int) -> datetime.date:
    return datetime.date(first, 1, 1) + datetime.timedelta(random.randrange((end - first) * 365))


@lru_cache
def _names(of: str, language: str) -> dict[int, str]:
    """The names of the months (1 to 12), or of the days of a week (0 to 6)."""
    names = getattr(require("babel.dates", "the phrase corpus"), f"get_{of}_names")
    return dict(names("wide", locale=LOCALES[language]))


def _plain(text: str) -> str:
    """The text with CLDR's no-break spaces replaced by ordinary ones."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")
