"""PosUnk: unknown target words that name the source word they translate.

Luong et al., Addressing the Rare Word Problem in Neural Machine Translation, 2015, as used by Zhou
et al. 2016. In the training text an unknown target word at position j, aligned with the source word
at position i, becomes the word `<unk:d>` with d = j - i; `<unk:null>` where it has no such word
within `FAR`. The model learns these words like any other. In a translation each of them becomes the
dictionary's word for the source word at j - d, or that source word itself. The dictionary and the
alignment are learned from the training text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from os import PathLike

from deepfast.files import DataError
from deepfast.mt.data.align import Links, Words
from deepfast.mt.data.text import read_lines, write_lines

FAR = 7
"""The largest distance that `<unk:d>` has, as in the paper."""
NULL = "<unk:null>"
MARK = re.compile(r"<unk:([+-]\d+|null)>")


def annotated(target: Words, links: Links, known: set[str]) -> list[str]:
    """The target's words with a mark for each that is not in ``known``."""
    source_of = {j: i for i, j in links}
    return [
        word if word in known else mark(j - source_of[j] if j in source_of else None)
        for j, word in enumerate(target)
    ]


def mark(distance: int | None) -> str:
    """`<unk:+2>` for 2; for None, or further than `FAR`, `<unk:null>`."""
    return NULL if distance is None or abs(distance) > FAR else f"<unk:{distance:+d}>"


def without_marks(source: Words, translation: str, translations: Mapping[str, str]) -> str:
    """The translation of a source with its marks replaced; one that points to no word is left
    out."""
    words = []
    for j, word in enumerate(translation.split()):
        found = MARK.fullmatch(word)
        if found is None:
            words.append(word)
        elif found[1] != "null" and 0 <= (i := j - int(found[1])) < len(source):
            words.append(translations.get(source[i], source[i]))
    return " ".join(words)


def write_translations(path: str | PathLike[str], counts: Mapping[str, Counter[str]]) -> None:
    """A line for each source word: the word, a tab, and the target word that it is most often
    linked with, of equally frequent ones the first.

    Args:
        counts: source word -> how often it is linked with each target word.
    """
    best = ((word, count.most_common(1)[0][0]) for word, count in sorted(counts.items()))
    write_lines(path, ("\t".join(pair) for pair in best))


def read_translations(path: str | PathLike[str]) -> dict[str, str]:
    """What `write_translations` wrote.

    Raises:
        DataError: a line without exactly one tab.
    """
    found = {}
    for number, line in enumerate(read_lines(path), 1):
        word, *others = line.split("\t")
        if len(others) != 1:
            raise DataError(f"{path}: expected a word, a tab and its translation in line {number}")
        found[word] = others[0]
    return found
