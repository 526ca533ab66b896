"""The errors of training; each is one sentence that a user can act on."""


class RecipeError(ValueError):
    """A recipe or an override that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, written, or continued from."""


class TrainingError(RuntimeError):
    """A run that cannot go on."""


class NotFiniteError(TrainingError):
    """A loss or gradient that is NaN or infinite."""
