"""Vocabularies of subwords, one for both languages or one for each: sentencepiece's BPE.

Sennrich et al. 2016, https://aclanthology.org/P16-1162; Kudo and Richardson 2018,
https://aclanthology.org/D18-2012.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deepfast.files import DataError, require, write_atomically

PAD, UNK, BOS, EOS = 0, 1, 2, 3
# Sentencepiece's sign for the space before a word.
SPACE = "▁"
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")


class Vocabulary:
    """Joint BPE with fixed ids: pad 0, unk 1, bos 2, eos 3. Or the most frequent words as a whole.

    Before it is split, text is normalised by NFKC and runs of white space become one space. Up to
    that, `decode(encode(text))` is `text`. A character that was not in the training text becomes
    unk, which decodes to `⁇`.

    A language tag such as `<de>` in front of a sentence is one token if the vocabulary was trained
    with this tag.

    With whole words, which spaces separate, every other word is one unk.

    Two vocabularies are equal where their bytes are.
    """

    pad_id, unk_id, bos_id, eos_id = PAD, UNK, BOS, EOS

    def __init__(self, model: bytes, *, name: str = "vocabulary") -> None:
        """Use `from_bytes`, `load` or `train`. `name` is what errors call this vocabulary."""
        self._description = _described(model, name)
        sentencepiece = require("sentencepiece", "a vocabulary")
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(f"{name}: sentencepiece cannot read this model ({error})") from error
        ids = processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id()
        if ids != (PAD, UNK, BOS, EOS):
            raise DataError(f"{name}: pad, unk, bos, eos must have the ids 0, 1, 2, 3, got {ids}")
        self._model = model
        self._processor = processor

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        size: int,
        *,
        path: str | os.PathLike[str] | None = None,
        at_most: bool = False,
        split_digits: bool = True,
        tags: Sequence[str] = (),
        whole_words: bool = False,
    ) -> Vocabulary:
        """Learn `size` pieces, specials included, from the sentences of both languages.

        The same sentences in the same order give the same bytes: training uses one thread and no
        random numbers.

        Args:
            path: where to save the result, or None.
            at_most: where the sentences support fewer than `size` pieces, learn that many.
            split_digits: every digit is a piece of its own, so that a model can copy figures.
            tags: language tags, each one piece; their ids start at 4.
            whole_words: learn the most frequent words in place of subwords.

        Raises:
            DataError: no sentences, or `size` is more or less than the sentences support (the
                error names the limit).
        """
        if size <= len(SPECIALS):
            raise DataError(f"vocabulary size must be more than {len(SPECIALS)}, got {size}")
        trainer = require("sentencepiece", "training a vocabulary").SentencePieceTrainer
        model = io.BytesIO()
        try:
            trainer.train(
                sentence_iterator=_one_line_each(sentences),
                model_writer=model,
                model_type="word" if whole_words else "bpe",
                vocab_size=size,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                # Every character of the training text gets a piece: no unk in training.
                character_coverage=1.0,
                split_digits=split_digits,
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
            raise DataError(_training_error(str(error), size)) from error
        vocabulary = cls(model.getvalue())
        if path is not None:
            vocabulary.save(path)
        return vocabulary

    @staticmethod
    def from_bytes(content: bytes) -> Vocabulary:
        """The inverse of `to_bytes`, of one vocabulary or of two.

        Raises:
            DataError: other content, an incomplete sentencepiece model, or other special ids.
        """
        # A sentencepiece model begins with the tag of a field, which is another byte.
        if content[:1] != b"{":
            return Vocabulary(bytes(content))
        try:
            held = json.loads(content.decode("utf-8"))
            sides = [base64.b64decode(held[side]) for side in ("source", "target")]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"vocabulary: expected two of them, got other data ({error})"
            ) from error
        return SeparateVocabularies(*map(Vocabulary, sides))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file written by `save`, which is an ordinary sentencepiece model.

        Raises:
            DataError: missing, truncated or foreign file, or other special ids.
        """
        path = Path(path)
        try:
            model = path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{path}: there is no such vocabulary file") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        return cls(model, name=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model; a reader never sees a part of it."""
        write_atomically(path, self._model)

    def to_bytes(self) -> bytes:
        """The whole vocabulary, to be kept inside a checkpoint."""
        return self._model

    def fingerprint(self) -> str:
        """A short digest: equal for equal vocabularies."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self):
        return Vocabulary.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        sizes = f"{len(self)} and {self.target_size} ids"
        return f"{type(self).__name__}({sizes}, {self.fingerprint()})"

    def __len__(self) -> int:
        return len(self._processor)

    @property
    def target(self) -> Vocabulary:
        """The vocabulary of the target's side: this one, which both sides share."""
        return self

    @property
    def target_size(self) -> int:
        """Number of ids on the target's side."""
        return len(self.target)

    @cached_property
    def tags(self) -> dict[str, int]:
        """Language tags and their ids."""
        pieces = enumerate(self._description.pieces)
        return {p.piece: index for index, p in pieces if p.type == p.USER_DEFINED}

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence, without bos and eos; a language tag in front has the first id."""
        # Sentencepiece takes some characters that separate words, such as VT, for nothing.
        tag, rest = self._known_tag(" ".join(sentence.split()))
        ids = (
            self._processor.PieceToId(self._words(rest))
            if self.whole_words
            else self._processor.EncodeAsIds(rest)
        )
        return [*(self.tags[name] for name in tag), *ids]

    def encode_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """The ids of both sides of every pair, ready for `TokenBatches`."""
        return [(self.encode(source), self.target.encode(target)) for source, target in pairs]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] | None = None) -> str:
        """The text of the ids, without pad, bos and eos; unk becomes `⁇`.

        unknown: for each unk in ids, in order, the words that replace it; may be "".

        Raises:
            DataError: an id outside the vocabulary, or ``unknown`` for another number of unks.
        """
        # Sentencepiece does not take tensors, nor a tensor's elements.
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if wrong := [i for i in ids if not 0 <= i < len(self)]:
            raise DataError(f"decode: ids must be from 0 to {len(self) - 1}, got {wrong[0]}")
        ids = [i for i in ids if i not in (PAD, BOS, EOS)]
        if unknown is None:
            text = self._processor.DecodeIds(ids)
        else:
            if len(unknown) != ids.count(UNK):
                raise DataError(
                    f"decode: unknown must be words for {ids.count(UNK)} unks, got {len(unknown)}"
                )
            words = iter(unknown)
            text = "".join(
                f" {next(words)} " if i == UNK else self._processor.IdToPiece(i).replace(SPACE, " ")
                for i in ids
            )
        # Sentencepiece puts spaces around its sign for unk.
        return " ".join(text.split())

    def pieces(self, sentence: str) -> list[str]:
        """The pieces of a sentence as text, one for each of its ids."""
        tag, rest = self._known_tag(sentence)
        split = self._words if self.whole_words else self._processor.EncodeAsPieces
        return [*tag, *split(rest)]

    def words(self, sentence: str) -> tuple[list[str], list[int]]:
        """The words of a sentence, and for each of its ids the number of its word."""
        words: list[str] = []
        numbers = []
        for piece in self.pieces(sentence):
            if piece.startswith(SPACE) or not words:
                words.append("")
            words[-1] += piece.removeprefix(SPACE)
            numbers.append(len(words) - 1)
        return words, numbers

    def _words(self, text: str) -> list[str]:
        """The words of a text as pieces. Sentencepiece would join unknown ones to one piece."""
        return [SPACE + word for word in self._processor.Normalize(text).split(SPACE) if word]

    @cached_property
    def whole_words(self) -> bool:
        """Whether the pieces are whole words."""
        spec = self._description.trainer_spec
        return spec.model_type == spec.WORD

    def _known_tag(self, sentence: str) -> tuple[list[str], str]:
        """The sentence's language tag, in a list that is empty where it has none, and the rest."""
        tag, rest = split_tag(sentence)
        return ([tag], rest) if tag in self.tags else ([], sentence)


class SeparateVocabularies(Vocabulary):
    """The source's `Vocabulary`, with another one for the target.

    `encode`, `pieces`, `words` and `tags` are those of the source, `decode` is that of the target.

    Attributes:
        target: the target's `Vocabulary`.
    """

    def __init__(self, source: Vocabulary, target: Vocabulary) -> None:
        super().__init__(source.to_bytes())
        self._target = target

    @property
    def target(self) -> Vocabulary:
        return self._target

    def to_bytes(self) -> bytes:
        sides = {"source": self._model, "target": self._target.to_bytes()}
        encoded = {side: base64.b64encode(model).decode() for side, model in sides.items()}
        return json.dumps(encoded).encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes two files: for ``vocabulary.model`` source.model and target.model beside it."""
        folder = Path(path).parent
        write_atomically(folder / "source.model", self._model)
        self._target.save(folder / "target.model")

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] | None = None) -> str:
        return self._target.decode(ids, unknown=unknown)


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
    first, _, rest = sentence.partition(" ")
    return (first, rest) if first.endswith(">") else (None, sentence)


def lower(sentence: str, tags: Container[str]) -> str:
    """The sentence in lower case, except for one of ``tags`` in front of it."""
    tag, rest = split_tag(sentence)
    return f"{tag} {rest.lower()}" if tag in tags else sentence.lower()


def _one_line_each(sentences: Iterable[str]) -> Iterator[str]:
    # Sentencepiece refuses a line end inside a sentence; from blank ones alone its versions before
    # 0.2.3 learn a vocabulary of nothing.
    return (sentence.replace("\n", " ") for sentence in sentences if not sentence.isspace())


def _training_error(message: str, size: int) -> str:
    if most := re.search(r"set it to a value <= (\d+)", message):
        return (
            f"vocabulary size {size} is more than these sentences support: "
            f"expected at most {most[1]}"
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocabulary size {size} is less than the specials and the distinct characters of "
            f"these sentences: expected at least {least[1]}"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return "a vocabulary needs at least one sentence with text, got none"
    return f"sentencepiece could not train a vocabulary of size {size} ({message})"
