"""The errors of training; each is one sentence that a user can act on."""

from typing import Any


class RecipeError(ValueError):
    """A recipe or an override that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, written, or continued from."""


class TrainingError(RuntimeError):
    """A run that cannot go on."""


class NotFiniteError(TrainingError):
    """A loss or gradient that is NaN or infinite."""


def expect(condition: bool, key: str, expected: str, got: Any) -> None:
    """Refuses a value of a recipe in a sentence."""
    if not condition:
        raise RecipeError(f"{key}: expected {expected}, got {got!r}")
