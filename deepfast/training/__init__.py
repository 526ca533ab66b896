"""Training a translation model from a recipe, resumable to the bit.

    from deepfast.training import load_recipe, train
    result = train(load_recipe("phrases-small", ["output=runs/small"]))

`Recipe` and its sections can also be made in Python; `deepfast.models.checkpoint.load_model` gives
the model of any checkpoint.
"""

from deepfast.training.checkpoint import average_checkpoints, load_checkpoint
from deepfast.training.errors import (
    CheckpointError,
    NotFiniteError,
    RecipeError,
    TrainingError,
)
from deepfast.training.recipe import DataSection, OptimSection, Recipe, TrainSection
from deepfast.training.recipe_file import dump_recipe, load_recipe, recipe_from_dict, recipe_names
from deepfast.training.run import TrainResult, train

__all__ = [
    "CheckpointError",
    "DataSection",
    "NotFiniteError",
    "OptimSection",
    "Recipe",
    "RecipeError",
    "TrainResult",
    "TrainSection",
    "TrainingError",
    "average_checkpoints",
    "dump_recipe",
    "load_checkpoint",
    "load_recipe",
    "recipe_from_dict",
    "recipe_names",
    "train",
]
