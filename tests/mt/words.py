"""A text of a few words with a known translation: word by word, in reverse order."""

import random

WORDS = {
    "one": "eins", "two": "zwei", "red": "rot", "blue": "blau", "tree": "Baum", "house": "Haus",
    "sees": "sieht", "and": "und", "the": "das", "small": "klein",
}  # fmt: skip


def reversed_pairs(count, seed=0):
    """Pairs of lists of one to seven words."""
    generator = random.Random(seed)
    rows = [generator.choices(list(WORDS), k=generator.randint(1, 7)) for _ in range(count)]
    return [(row, [WORDS[word] for word in reversed(row)]) for row in rows]


def write_pairs(folder, part, pairs):
    """Writes PART.en and PART.de."""
    for name, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        text = "".join(" ".join(line) + "\n" for line in lines)
        (folder / f"{part}.{name}").write_text(text, "utf-8")
