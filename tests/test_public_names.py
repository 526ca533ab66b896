"""What is public, as text: names and arguments, keys of recipes, options of commands.

A change of it must be meant: `python -m tests.test_public_names` writes tests/data/public_names.txt
again. CHANGELOG.md says what may change.
"""

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from deepfast.cli import COMMANDS
from deepfast.mt.models import KINDS
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.training.recipe import SECTIONS, Recipe

SNAPSHOT = Path(__file__).parent / "data" / "public_names.txt"
MODULES = ("deepfast", "deepfast.ops", "deepfast.nn", "deepfast.memory")


def _arguments(function) -> str:
    """Names and defaults; annotations are checked by types."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return re.sub(r"<object object at \w+>", "...", str(inspect.Signature(plain)))


def _public() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            found = getattr(module, name)
            if not callable(found):
                continue
            yield f"{module_name}.{name}{_arguments(found)}"
            for method, value in inspect.getmembers(found, inspect.isfunction):
                own = value.__module__.startswith("deepfast") and inspect.isclass(found)
                if own and value.__doc__ and method[0] != "_":
                    yield f"{module_name}.{name}.{method}{_arguments(value)}"


def _keys() -> set[str]:
    """The keys of recipes."""
    parts = {name: [cls] for name, cls in SECTIONS.items()}
    parts["model"] = [model.Config for model in KINDS.values()]
    keys = {f"{name}.{f.name}" for name in parts for cls in parts[name] for f in fields(cls)}
    keys |= {f.name for f in fields(Recipe)} - parts.keys()
    return keys - {f"model.{name}" for name in DERIVED_FIELDS} | {"model.kind", "model.size"}


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        if name == "mt":
            continue
        path = name.replace(" ", ".").replace("-", "_")
        parser = argparse.ArgumentParser()
        importlib.import_module(f"deepfast.cli.{path}").add_arguments(parser)
        actions = parser._actions[1:]
        yield f"deepfast {name}: " + " ".join((a.option_strings or [a.dest])[-1] for a in actions)


def lines() -> list[str]:
    return [*_public(), *(f"recipe: {key}" for key in sorted(_keys())), *_commands()]


def test_the_public_names_are_those_of_the_snapshot():
    assert lines() == SNAPSHOT.read_text().splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
