"""The errors of the data package, and the import of optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType


class DataError(ValueError):
    """Text, a vocabulary or batches that cannot be used; one sentence says why."""


class MissingPackage(DataError, ImportError):
    """An optional package is not installed; the sentence names the extra that installs it."""


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional module by its dotted name.

    Raises:
        MissingPackage: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        extra = "report" if package in ("matplotlib", "jinja2") else "train"
        raise MissingPackage(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"pip install 'deepfast[{extra}]'"
        ) from error
