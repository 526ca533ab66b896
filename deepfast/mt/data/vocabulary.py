"""Vocabularies of subwords, one for both languages or one for each: sentencepiece's BPE.

Sennrich et al. 2016, https://aclanthology.org/P16-1162; Kudo and Richardson 2018,
https://aclanthology.org/D18-2012.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from deepfast.files import DataError, require, write_atomically
from deepfast.mt.data.text import opened
from deepfast.mt.ids import BOS, EOS, PAD, UNK

# Sentencepiece's sign for the space before a word.
SPACE = "▁"
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
TWO = b"\0"
"""Begins the bytes of two vocabularies; those of one begin with another byte."""


class Vocabulary:
    """Joint BPE with fixed ids: pad 0, unk 1, bos 2, eos 3. Or the most frequent words as a whole.

    Before it is split, text is normalised by NFKC and runs of white space become one space. Up to
    that, `decode(encode(text))` is `text`. A character that was not in the training text becomes
    unk, which decodes to `⁇`.

    A language tag such as `<de>` in front of a sentence is one token if the vocabulary was trained
    with this tag.

    With whole words, which spaces separate, every other word is one unk.

    Two vocabularies are equal where their bytes are.

    Attributes:
        tags: language tags and their ids.
        whole_words: whether the pieces are whole words.
        target: the vocabulary of the target's side; this one, unless `with_target` has set another.
    """

    pad_id, unk_id, bos_id, eos_id = PAD, UNK, BOS, EOS

    def __init__(self, model: bytes, *, name: str = "vocabulary") -> None:
        """Use `from_bytes`, `load` or `train`. `name` is what errors call this vocabulary."""
        self._model, described = model, _described(model, name)
        pieces, spec = enumerate(described.pieces), described.trainer_spec
        self.tags = {p.piece: index for index, p in pieces if p.type == p.USER_DEFINED}
        self.whole_words = spec.model_type == spec.WORD
        sentencepiece = require("sentencepiece", "a vocabulary")
        self._processor = p = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = p.pad_id(), p.unk_id(), p.bos_id(), p.eos_id()
        if ids != (PAD, UNK, BOS, EOS):
            raise DataError(f"{name}: pad, unk, bos, eos must have the ids 0, 1, 2, 3, got {ids}")
        self.target: Vocabulary = self

    def with_target(self, target: Vocabulary) -> Vocabulary:
        """This vocabulary for the source, with another one for the target: `decode` is then that of
        the target."""
        both = copy.copy(self)
        both.target = target
        return both

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        size: int,
        *,
        at_most: bool = False,
        tags: Sequence[str] = (),
        whole_words: bool = False,
    ) -> Vocabulary:
        """Learn `size` pieces, specials included, from the sentences of both languages.

        The same sentences in the same order give the same bytes: training uses one thread and no
        random numbers.

        Args:
            at_most: where the sentences support fewer than `size` pieces, learn that many.
            tags: language tags, each one piece; their ids start at 4.
            whole_words: learn the most frequent words in place of subwords.

        Raises:
            DataError: no sentences, or `size` is more or less than the sentences support (the
                error names the limit).
        """
        trainer = require("sentencepiece", "training a vocabulary").SentencePieceTrainer
        model = io.BytesIO()
        try:
            trainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="word" if whole_words else "bpe",
                vocab_size=size,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                # Every character of the training text gets a piece: no unk in training.
                character_coverage=1.0,
                # A model can then copy figures.
                split_digits=True,
                user_defined_symbols=list(tags),
                hard_vocab_limit=not at_most,
                num_threads=1,
                input_sentence_size=0,
                shuffle_input_sentence=False,
                # In bytes; the default silently skips longer sentences.
                max_sentence_length=1 << 20,
                minloglevel=2,
            )
        except RuntimeError as error:
            # Behind the place in its code sentencepiece says the least or the greatest size, and
            # then which of its own options to change.
            reason = str(error).rpartition("] ")[2].partition(" Increase")[0]
            reason = reason or "the sentences have no text"
            if "too high" in reason:
                reason += " In a recipe data.vocab_at_most=true takes the largest that there is."
            raise DataError(f"a vocabulary of size {size} cannot be learned: {reason}") from error
        return cls(model.getvalue())

    @staticmethod
    def from_bytes(content: bytes) -> Vocabulary:
        """The inverse of `to_bytes`.

        Raises:
            DataError: other content, an incomplete sentencepiece model, or other special ids.
        """
        if not content.startswith(TWO):
            return Vocabulary(content)
        start = len(TWO) + 8
        end = start + int.from_bytes(content[len(TWO) : start])
        return Vocabulary(content[start:end]).with_target(Vocabulary(content[end:]))

    def to_bytes(self) -> bytes:
        """The whole vocabulary, of both sides, to be kept inside a checkpoint."""
        if self.target is self:
            return self._model
        return TWO + len(self._model).to_bytes(8) + self._model + self.target._model

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file written by `save`, which is an ordinary sentencepiece model.

        Raises:
            DataError: missing, truncated or foreign file, or other special ids.
        """
        with opened(path) as stream:
            return cls(stream.read(), name=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model; of two vocabularies source.model and target.model beside ``path``."""
        if self.target is self:
            write_atomically(path, self._model)
        else:
            write_atomically(Path(path).with_name("source.model"), self._model)
            self.target.save(Path(path).with_name("target.model"))

    def fingerprint(self) -> str:
        """A short digest: equal for equal vocabularies."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_bytes() == other.to_bytes()

    def __len__(self) -> int:
        """The number of ids, of the source's side."""
        return len(self._processor)

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence, without bos and eos; a language tag in front has the first id."""
        tag, rest = self._known_tag(sentence)
        ids = (
            self._processor.PieceToId(self._words(rest))
            if self.whole_words
            else self._processor.EncodeAsIds(rest)
        )
        return [*(self.tags[name] for name in tag), *ids]

    def encode_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """The ids of both sides of every pair, ready for `TokenBatches`."""
        return [(self.encode(source), self.target.encode(target)) for source, target in pairs]

    def decode(self, ids: Iterable[int], *, unknown: str = "⁇") -> str:
        """The target's text of the ids, without pad, bos and eos, with ``unknown`` for each unk."""
        runs: list[list[int]] = [[]]
        for i in map(int, ids):
            if i == UNK:
                runs.append([])
            elif i not in (PAD, BOS, EOS):
                runs[-1].append(i)
        text = f" {unknown} ".join(map(self.target._processor.DecodeIds, runs))
        return " ".join(text.split())

    def pieces(self, sentence: str) -> list[str]:
        """The pieces of a sentence as text, one for each of its ids."""
        tag, rest = self._known_tag(sentence)
        split = self._words if self.whole_words else self._processor.EncodeAsPieces
        return [*tag, *split(rest)]

    def _words(self, text: str) -> list[str]:
        """The words of a text as pieces. Sentencepiece would join unknown ones to one piece."""
        return [SPACE + word for word in self._processor.Normalize(text).split(SPACE) if word]

    def _known_tag(self, sentence: str) -> tuple[list[str], str]:
        """The sentence's language tag, in a list that is empty where it has none, and the rest."""
        # Sentencepiece takes some characters that separate words, such as VT, for nothing.
        sentence = " ".join(sentence.split())
        tag, rest = split_tag(sentence)
        return ([tag], rest) if tag in self.tags else ([], sentence)


def _described(model: bytes, name: str) -> Any:
    """The message that a model is, which has more than sentencepiece's processor shows.

    A model that is cut between two fields still parses. It would give a vocabulary without some
    pieces or without the normalisation.
    """
    message = require("sentencepiece.sentencepiece_model_pb2", "a vocabulary").ModelProto()
    with contextlib.suppress(require("google.protobuf.message", "a vocabulary").DecodeError):
        message.ParseFromString(model)
        if (
            message.pieces
            and message.HasField("trainer_spec")
            and message.HasField("normalizer_spec")
        ):
            return message
    raise DataError(
        f"{name}: expected a whole sentencepiece model, got {len(model)} bytes of another file "
        "or of a part of one"
    )


def tag_of(language: str) -> str:
    """`<de>` for `de`: the tag in front of a source sentence names the language to translate to."""
    return f"<{language}>"


def split_tag(sentence: str) -> tuple[str | None, str]:
    """A tag in front of a sentence, or None, and the rest."""
    sentence = sentence.lstrip()
    if not sentence.startswith("<"):
        return None, sentence
    first, *rest = sentence.split(maxsplit=1)
    return (first, "".join(rest)) if first.endswith(">") else (None, sentence)


def lower(sentence: str, tags: Container[str]) -> str:
    """The sentence in lower case, except for one of ``tags`` in front of it."""
    tag, rest = split_tag(sentence)
    return f"{tag} {rest.lower()}" if tag in tags else sentence.lower()
