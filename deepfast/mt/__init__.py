"""The translation toolkit.

deepfast.mt.data      text in, batches out
deepfast.mt.models    whole models
deepfast.mt.training  a model from a recipe
deepfast.mt.search    from a trained model to text
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepfast.mt import data, models, search, training

__all__ = ["data", "models", "search", "training"]


def __getattr__(name: str):
    # Loaded when first used: text needs no torch.
    if name in __all__:
        return importlib.import_module(f"deepfast.mt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
