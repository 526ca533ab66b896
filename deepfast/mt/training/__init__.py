"""Training a translation model from a recipe. A run that resumes gives the same bits.

    from deepfast.mt.training import load_recipe, train
    result = train(load_recipe("phrases-small", ["output=runs/small"]))

`Recipe` and its sections can also be made in Python. `deepfast.mt.models.checkpoint.load_model`
loads the model of a checkpoint.

Begin with `run.train`, which says when what happens, and `trainer.Trainer.train_step`, one step
from batches to new parameters. `recipe` holds what a run is made of, `recipe_file` reads it from
YAML, `corpus` makes batches of text, `growing` plans the second run of depth growing, `memory` fits
a run into a budget. `saving` writes checkpoints and lets a run resume, and `run_folder` knows which
there are. `ranks` connects the processes that torchrun starts, and `parallel` divides a step and
the model among them.
"""

from deepfast.mt.models.checkpoint import average_checkpoints, load_checkpoint
from deepfast.mt.training.errors import (
    CheckpointError,
    NotFiniteError,
    RecipeError,
    TrainingError,
)
from deepfast.mt.training.recipe import (
    DataSection,
    OptimSection,
    Recipe,
    TrainSection,
)
from deepfast.mt.training.recipe_file import (
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    recipe_names,
)
from deepfast.mt.training.report import TrainResult
from deepfast.mt.training.run import train

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
