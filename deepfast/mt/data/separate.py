"""Two vocabularies of subwords, one for each language."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepfast.files import DataError
from deepfast.mt.data.vocabulary import Vocabulary

KIND = "deepfast-separate"


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

    @classmethod
    def from_bytes(cls, model: bytes) -> SeparateVocabularies:
        """The inverse of `to_bytes`.

        Raises:
            DataError: other content.
        """
        try:
            held = json.loads(model)
            if held["kind"] != KIND:
                raise ValueError(f"kind {held['kind']!r}")
            sides = [base64.b64decode(held[side]) for side in ("source", "target")]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"vocabulary: expected two vocabularies, got {error}") from error
        return cls(*(Vocabulary(side) for side in sides))

    def to_bytes(self) -> bytes:
        """Both vocabularies, to be kept inside a checkpoint."""
        sides = {"source": self._model, "target": self._target.to_bytes()}
        encoded = {side: base64.b64encode(model).decode() for side, model in sides.items()}
        return json.dumps({"kind": KIND} | encoded).encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes two files: for ``vocabulary.model`` source.model and target.model beside it."""
        folder = Path(path).parent
        Vocabulary(self._model).save(folder / "source.model")
        self._target.save(folder / "target.model")

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeparateVocabularies) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self):
        return SeparateVocabularies, (Vocabulary(self._model), self._target)

    def __repr__(self) -> str:
        sizes = f"{len(self)} and {self.target_size} pieces"
        return f"SeparateVocabularies({sizes}, {self.fingerprint()})"

    def encode_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        return [(self.encode(source), self._target.encode(target)) for source, target in pairs]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] | None = None) -> str:
        return self._target.decode(ids, unknown=unknown)
