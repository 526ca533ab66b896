"""Recipe files and overrides: YAML in, `Recipe` out, and a sentence for every mistake."""

from __future__ import annotations

import difflib
import importlib.resources
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepfast.checks import shown
from deepfast.files import require
from deepfast.mt.training.errors import CheckpointError, RecipeError, expect
from deepfast.mt.training.growing import check_grow
from deepfast.mt.training.recipe import SECTIONS, Recipe

KEPT = (
    "data.vocabulary", "data.vocab_size", "data.target_vocabulary", "data.target_vocab_size",
    "data.whole_words", "data.vocab_at_most", "data.phrases", "data.languages", "data.direction",
    "data.seed", "data.train_size", "train.seed",
)  # fmt: skip
"""Keys of which a run that resumes goes on with the old value: its vocabulary, languages,
generated text, and random numbers."""


def recipe_names() -> dict[str, str]:
    """Name -> first comment line of every recipe that ships with the package."""
    folder = importlib.resources.files("deepfast.mt") / "recipes"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {
        f.name.removesuffix(".yaml"): f.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for f in files
    }


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a file, or one shipped with the package, with `key=value` overrides.

    Args:
        name: path of a YAML file, or a name of `recipe_names()`.
        overrides: such as `"model.encoder_layers=60"`; values are YAML, keys are dotted. null for
            a section, `"model.latent=null"`, removes what the file has in it. A path may begin
            with ~, the home.

    Raises:
        RecipeError: there is no such recipe, its YAML cannot be read, a key is unknown, or a value
            has a wrong type or is out of range.
    """
    tree, _ = read_recipe_file(name)
    # Only `deepfast mt sweep` reads it.
    tree.pop("sweep", None)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise RecipeError(f"{shown(override)}: expected key=value, such as optim.lr=2e-3")
        value = parse_yaml(text, f"{override:.100}")
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        tree = _merged(tree, value)
    return recipe_from_dict(tree)


def read_recipe_file(name: str | Path) -> tuple[dict[str, Any], str]:
    """The sections of a recipe's file as they are written, and the file's name.

    Raises:
        RecipeError: there is no such recipe, or it does not hold keys and values in YAML.
    """
    text, where = _read(name)
    tree = parse_yaml(text, where)
    expect(isinstance(tree, dict), where, "keys and values", tree)
    return tree, where


def recipe_from_dict(tree: dict[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`, with the same checks as a file."""
    values = {str(key): value for key, value in tree.items()}
    for name, section in SECTIONS.items():
        given = {} if values.get(name) is None else values[name]
        expect(isinstance(given, dict), name, "keys and values", given)
        values[name] = section(**{str(key): value for key, value in given.items()})
    recipe = Recipe(**values)
    check_grow(recipe)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """A recipe as YAML, which `load_recipe` reads."""
    yaml = require("ruamel.yaml", "writing a recipe").YAML(typ="safe", pure=True)
    yaml.default_flow_style = yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    yaml.dump(recipe.to_dict(), text)
    return text.getvalue()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The changes between two recipes as dictionaries, each `key old -> new`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key} {shown(before)} -> {shown(after)}")
    return lines


def check_kept(changes: list[str], path: Path) -> None:
    """Refuses to resume with another value where the run would go on with its old one.

    Args:
        changes: `differences` from the recipe of the checkpoint at ``path``.

    Raises:
        CheckpointError: one of them is of a key in `KEPT`.
    """
    for change in changes:
        if change.partition(" ")[0] in KEPT:
            raise CheckpointError(
                f"{path}: {change}: resuming cannot change it; a new run can, with output=FOLDER"
            )


def _read(name: str | Path) -> tuple[str, str]:
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise RecipeError(f"{path}: cannot be read ({reason})") from error
    shipped = recipe_names()
    stem = str(name).removesuffix(".yaml")
    if stem in shipped:
        file = importlib.resources.files("deepfast.mt") / "recipes" / f"{stem}.yaml"
        return file.read_text("utf-8"), f"{stem}.yaml"
    near = difflib.get_close_matches(stem, shipped, 1)
    hint = f", the nearest one is {near[0]}" if near else ": deepfast mt train --list names them"
    raise RecipeError(f"{name}: expected a recipe file or the name of a shipped recipe{hint}")


def parse_yaml(text: str, where: str) -> Any:
    """A value of YAML 1.2, in which 1e-3 is a number and "no" is text.

    Raises:
        RecipeError: the text is not YAML.
    """
    yaml = require("ruamel.yaml", "reading a recipe")
    # The directive %YAML 1.1 would make "no" false.
    if re.search("^%", text, re.MULTILINE):
        raise RecipeError(f"{where}: expected YAML without directives, got one that begins with %")
    reader = yaml.YAML(typ="safe", pure=True)
    try:
        return reader.load(text)
    # The others are those of Python's functions for numbers and dates, which get the text.
    except (yaml.YAMLError, LookupError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        # An error about a character has no problem, and two lines.
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise RecipeError(f"{where}: expected YAML, got an error{at}: {problem:.200}") from error


def _merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A tree with changes. An empty section removes what the tree has in it."""
    found = dict(tree)
    for key, value in changes.items():
        there = found.get(key)
        both = isinstance(there, dict) and isinstance(value, dict) and value
        found[key] = _merged(there, value) if both else value
    return found
