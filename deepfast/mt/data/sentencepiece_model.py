"""What sentencepiece does not say about its model: read from the file, a protobuf message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepfast.files import DataError

# Top-level fields of sentencepiece's ModelProto, in the order in which they are written.
PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3
# Fields of a piece, and the type of a piece that the user defined.
TEXT, TYPE, USER_DEFINED = 1, 3, 4
# A field of the trainer spec, and its value for a vocabulary of whole words.
MODEL_TYPE, WORD = 3, 3


def check_complete(model: bytes, name: str) -> None:
    """Refuses a file that ends early; `name` is what the error calls it.

    A file cut between two top-level fields still parses. It would give a vocabulary without some
    pieces or without the normalisation, and wrong translations instead of an error.
    """
    numbers, whole = set(), True
    try:
        for number, value in _fields(model):
            # All of ModelProto's fields hold bytes.
            whole = whole and isinstance(value, bytes)
            numbers.add(number)
    except EOFError:
        whole = False
    if whole and {PIECES, TRAINER_SPEC, NORMALIZER_SPEC} <= numbers:
        return
    if PIECES in numbers:
        raise DataError(f"{name}: the vocabulary is cut short or damaged ({len(model)} bytes)")
    raise DataError(f"{name}: expected a sentencepiece model, got {len(model)} bytes of other data")


def user_defined(model: bytes) -> dict[str, int]:
    """The pieces that the user defined, and their ids; sentencepiece does not show the type."""
    pieces = [dict(_fields(value)) for number, value in _fields(model) if number == PIECES]
    return {
        piece[TEXT].decode(): index
        for index, piece in enumerate(pieces)
        if piece.get(TYPE) == USER_DEFINED
    }


def has_whole_words(model: bytes) -> bool:
    """Whether the pieces are whole words."""
    return dict(_fields(dict(_fields(model))[TRAINER_SPEC])).get(MODEL_TYPE) == WORD


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value, bytes or an int, of every field of a protobuf message.

    Raises:
        EOFError: the message ends inside a field.
    """
    position = 0
    value: bytes | int
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == 0:
            value, position = _varint(message, position)
        else:
            # A value of eight or four bytes, or a length and that many bytes.
            length = 8 if tag & 7 == 1 else 4
            if tag & 7 == 2:
                length, position = _varint(message, position)
            value = message[position : position + length]
            position += length
            if position > len(message):
                raise EOFError
        yield tag >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise EOFError
