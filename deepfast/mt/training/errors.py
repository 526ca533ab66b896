"""The errors of training. Each is one sentence that says what to change."""

from typing import Any

from deepfast.checks import shown
from deepfast.mt.models.checkpoint import CheckpointError as CheckpointError


class RecipeError(ValueError):
    """The recipe or an override cannot be used."""


class TrainingError(RuntimeError):
    """The run cannot go on."""


class NotFiniteError(TrainingError):
    """The loss or a gradient is NaN or infinite."""


class OtherRankError(TrainingError):
    """Another rank failed and reported its error, so this rank exits without a message."""


def expect(condition: object, key: str, expected: str, got: Any) -> None:
    """Refuses a recipe's value if the condition does not hold."""
    if not condition:
        raise RecipeError(f"{key}: expected {expected}, got {shown(got)}")
