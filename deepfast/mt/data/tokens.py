"""A vocabulary of tokens separated by blanks, with one dictionary for each language.

For models that other tools trained on text that was already split into words or subwords: lines
must be split as in training. A piece that ends in ``@@`` is joined to the next (Sennrich et
al. 2016).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from deepfast.files import DataError
from deepfast.mt.data.text import read_lines
from deepfast.mt.data.vocabulary import (
    EOS,
    PAD,
    UNK,
    AnyVocabulary,
    SeparateVocabularies,
    Vocabulary,
    expected,
    plain_ids,
    read_sides,
)

KIND = "deepfast-tokens"
SPECIAL_IDS = 4
JOINED = re.compile(r"@@( |$)")
UNKNOWN_SIGN = "⁇"


class TokenVocabulary(AnyVocabulary):
    """Tokens separated by blanks, with fixed ids: pad 0, unk 1, eos 3; the tokens start at 4.

    Language tags are ordinary tokens here. No token has id 2. Decoding begins with eos, so eos is
    also bos. `encode` uses the source's dictionary, `decode` the target's.
    """

    pad_id, unk_id, bos_id, eos_id = PAD, UNK, EOS, EOS

    def __init__(self, source: Sequence[str], target: Sequence[str] | None = None) -> None:
        """source, target: the tokens, whose ids start at 4. target=None: the source's tokens."""
        self.source = tuple(source)
        self.target = self.source if target is None else tuple(target)
        for name, tokens in (("source", self.source), ("target", self.target)):
            for number, token in enumerate(tokens, 1):
                if not isinstance(token, str) or not token:
                    raise DataError(
                        f"{name} dictionary: expected tokens, got {token!r} at place {number}"
                    )
        # Where a token occurs twice its last place counts, as in fairseq.
        self._ids = {token: place for place, token in enumerate(self.source, SPECIAL_IDS)}

    @classmethod
    def from_bytes(cls, model: bytes) -> Self:
        with expected("a dictionary of tokens"):
            return cls(*read_sides(model, KIND))

    def to_bytes(self) -> bytes:
        target = None if self.target == self.source else self.target
        held = {"kind": KIND, "source": self.source, "target": target}
        return json.dumps(held, ensure_ascii=False).encode("utf-8")

    def __len__(self) -> int:
        return len(self.source) + SPECIAL_IDS

    @property
    def target_size(self) -> int:
        return len(self.target) + SPECIAL_IDS

    def encode(self, sentence: str) -> list[int]:
        """The ids of a source sentence, without eos."""
        return [self._ids.get(token, UNK) for token in sentence.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of target ids, pieces joined, without special tokens; unk becomes `⁇`.

        Raises:
            DataError: an id outside the vocabulary.
        """
        tokens = [
            UNKNOWN_SIGN if i == UNK else self.target[i - SPECIAL_IDS]
            for i in plain_ids(ids, self.target_size)
            if i == UNK or i >= SPECIAL_IDS
        ]
        return JOINED.sub("", " ".join(tokens))


def read_vocabulary(content: bytes) -> Vocabulary | TokenVocabulary:
    """The vocabulary of a checkpoint, of any kind.

    Raises:
        DataError: neither sentencepiece models nor a dictionary of tokens.
    """
    # A sentencepiece model begins with the tag of a field, which is another byte.
    if content[:1] != b"{":
        return Vocabulary.from_bytes(content)
    separate = f'"{SeparateVocabularies.KIND}"'.encode() in content[:100]
    return (SeparateVocabularies if separate else TokenVocabulary).from_bytes(content)


def subwords(content: bytes) -> Vocabulary:
    """The vocabulary of a checkpoint to train on, which must be one of subwords.

    Raises:
        DataError: other content, or a dictionary of tokens.
    """
    vocabulary = read_vocabulary(content)
    if isinstance(vocabulary, TokenVocabulary):
        raise DataError("vocabulary: expected sentencepiece models, got a dictionary of tokens")
    return vocabulary


def read_dictionary(path: str | Path) -> list[str]:
    """The tokens of a dictionary file, one ``token count`` a line.

    Raises:
        DataError: an unreadable file, or a line of another form (names it).
    """
    tokens = []
    for number, line in enumerate(read_lines(path), 1):
        token, blank, count = line.rpartition(" ")
        if not (blank and token and count.isascii() and count.isdigit()):
            raise DataError(f"{path}:{number}: expected a token and its count, got {line!r}")
        tokens.append(token)
    return tokens
