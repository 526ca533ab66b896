"""Recipe files and overrides: YAML in, `Recipe` out, and a sentence for every mistake."""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import math
import reprlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepfast.checks import shown
from deepfast.files import require
from deepfast.mt.models import KINDS
from deepfast.mt.models.interface import DERIVED_FIELDS
from deepfast.mt.models.transformer_config import option_types
from deepfast.mt.training.errors import CheckpointError, RecipeError
from deepfast.mt.training.growing import BEST, FIRST, TOP_FIELDS, check_grow
from deepfast.mt.training.recipe import SECTIONS, Recipe
from deepfast.mt.training.sections import MaybeFile, convert, field_types


def _known_types() -> dict[str, Any]:
    """Dotted key -> type of its value, for every key that a recipe may hold."""
    model: dict[str, Any] = {"kind": str, "size": str | None}
    for each in KINDS.values():
        model |= typing.get_type_hints(each.Config)
    for name in ("dlcl", "top_dlcl", "latent", "fusion"):
        options = option_types(name.removeprefix("top_"))
        model |= {f"{name}.{key}": kind for key, kind in options.items()}
    known = {f"model.{key}": kind for key, kind in model.items() if key not in DERIVED_FIELDS}
    for name, cls in SECTIONS.items():
        known |= {f"{name}.{key}": kind for key, kind in field_types(cls).items()}
    known |= {k: v for k, v in field_types(Recipe).items() if k not in (*SECTIONS, "model", "grow")}
    grown = ("optim.", "train.", *(f"model.{name}" for name in TOP_FIELDS))
    known |= {f"grow.{key}": kind for key, kind in known.items() if key.startswith(grown)}
    return known | {"grow.from": MaybeFile | None}


KEYS = _known_types()

MOST_BITS = 1000
"""Of an integer in a recipe: a float holds it, and Python prints it."""

MOST_VALUES = 10_000
"""Keys and values of a recipe, where an alias counts as all that it stands for."""

NESTED = {key[:i] for key in KEYS for i, letter in enumerate(key) if letter == "."}
"""Keys that hold further keys."""


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
    tree, where = read_recipe_file(name)
    # Only `deepfast mt sweep` reads it.
    tree.pop("sweep", None)
    flat = _flatten(tree, where)
    for override in overrides:
        where = f"{override:.100}"
        key, equals, value = override.partition("=")
        if not equals:
            raise RecipeError(f"{shown(override)}: expected key=value, such as optim.lr=2e-3")
        changes = _flatten(_nested(key.strip(), _parse(value, where)), where)
        # An empty section removes what the file has in it.
        if not changes:
            flat = {k: v for k, v in flat.items() if not k.startswith(f"{key.strip()}.")}
        flat |= changes
    return _build(flat)


def read_recipe_file(name: str | Path) -> tuple[dict[str, Any], str]:
    """The sections of a recipe's file as they are written, and the file's name.

    Raises:
        RecipeError: there is no such recipe, or it does not hold keys and values in YAML.
    """
    text, where = _read(name)
    tree = _parse(text, where)
    if not isinstance(tree, dict):
        raise RecipeError(f"{where}: expected keys and values, got {type(tree).__name__}")
    return tree, where


def recipe_from_dict(tree: dict[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`, with the same checks as a file."""
    return _build(_flatten(tree, "recipe"))


def dump_recipe(recipe: Recipe) -> str:
    """A recipe as YAML, which `load_recipe` reads."""
    yaml = require("yaml", "writing a recipe")
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The changes between two recipes as dictionaries, each `key old -> new`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        # A section that is newer than the checkpoint changed nothing.
        if key not in old and isinstance(after, dict) and not prefix:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key} {shown(before)} -> {shown(after)}")
    return lines


LEARNED = ("vocabulary", "vocab_size", "target_vocabulary", "target_vocab_size", "whole_words",
           "vocab_at_most")  # fmt: skip
GENERATED = ("phrases", "direction", "seed", "train_size")
"""Keys of the section `data` that decide the vocabulary, and the generated training pairs."""


def check_kept(recipe: Recipe, old: dict[str, Any], step: int, path: Path) -> None:
    """Refuses to resume with another value where the run would go on with its old one.

    Args:
        old, step: the recipe of the checkpoint at ``path``, and its step.

    Raises:
        CheckpointError: the recipe has another vocabulary, seed, generated text, checkpoint to grow
            on, or restart of Adam before ``step``.
    """
    new = recipe.to_dict()
    data = LEARNED + GENERATED * (recipe.data.phrases is not None)
    kept = [*(("data", name) for name in data), ("train", "seed"), ("optim", "restart_step")]
    # The best checkpoint of the first of two runs moves with their folder.
    if recipe.grow and Path(recipe.grow["from"]) != Path(recipe.output).parent / FIRST / BEST:
        kept.append(("grow", "from"))
    for section, name in kept:
        after = new[section][name]
        # A key that is newer than the checkpoint changed nothing.
        before = (old.get(section) or {}).get(name, after)
        ahead = name == "restart_step" and all(s is None or s >= step for s in (before, after))
        if before != after and not ahead:
            raise CheckpointError(
                f"{path}: {section}.{name}: expected {shown(before)}, got {shown(after)}: resuming "
                "cannot change it; a new run can, with output=FOLDER"
            )


def _read(name: str | Path) -> tuple[str, str]:
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text("utf-8"), str(path)
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: expected UTF-8, got other bytes") from error
    shipped = recipe_names()
    stem = str(name).removesuffix(".yaml")
    if stem in shipped:
        file = importlib.resources.files("deepfast.mt") / "recipes" / f"{stem}.yaml"
        return file.read_text("utf-8"), f"{stem}.yaml"
    near = difflib.get_close_matches(stem, shipped, 1)
    hint = f", the nearest one is {near[0]}" if near else ": deepfast mt train --list names them"
    raise RecipeError(f"{name}: expected a recipe file or the name of a shipped recipe{hint}")


def _parse(text: str, where: str) -> Any:
    yaml = require("yaml", "reading a recipe")
    try:
        return yaml.load(text, _loader(yaml))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        # An error about a character has no problem, and two lines.
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise RecipeError(f"{where}: expected YAML, got an error{at}: {problem}") from error
    except RecursionError as error:
        raise RecipeError(
            f"{where}: expected keys and values, got too many nested levels"
        ) from error


def _loader(yaml: Any) -> Any:
    """YAML's safe loader, which refuses what aliases make huge, and names a key that stands twice
    and a value that its tag refuses."""

    class Loader(yaml.SafeLoader):
        def get_single_node(self):
            node = super().get_single_node()
            if node is not None and _expanded(node, {}) > MOST_VALUES:
                raise yaml.constructor.ConstructorError(
                    problem=f"more than {MOST_VALUES} keys and values, with those of its aliases"
                )
            return node

        def construct_mapping(self, node, deep=False):
            seen = set()
            # A tag can call anything a mapping; the safe loader refuses what is none.
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_object(self, node, deep=False):
            try:
                value = super().construct_object(node, deep)
            # What the safe loader's functions for tags raise for a text that does not fit.
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                kind = node.tag.rpartition(":")[2]
                raise yaml.constructor.ConstructorError(
                    problem=f"{reprlib.repr(node.value)} is not a valid {kind}",
                    problem_mark=node.start_mark,
                ) from error
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise yaml.constructor.ConstructorError(
                    problem=f"{reprlib.repr(node.value)} has too many digits",
                    problem_mark=node.start_mark,
                )
            return value

    return Loader


def _expanded(node: Any, sizes: dict[int, float]) -> float:
    """Keys and values at and below a node of YAML, where an alias counts as all that it stands for;
    infinity for a node inside itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        # The value of a scalar is text, that of a mapping has pairs.
        below = [] if isinstance(node.value, str) else node.value
        nodes = itertools.chain(*(each if isinstance(each, tuple) else [each] for each in below))
        sizes[id(node)] = 1 + sum(_expanded(each, sizes) for each in nodes)
    return sizes[id(node)]


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _flatten(tree: dict, where: str, prefix: str = "") -> dict[str, Any]:
    """Nested keys to dotted ones; refuses unknown keys and values of a wrong type."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in NESTED:
            if value is not None and not isinstance(value, dict):
                raise RecipeError(f"{where}: {key}: expected keys and values, got {shown(value)}")
            if value is not None:
                flat |= _flatten(value, where, f"{key}.") if value else {key: {}}
        elif key not in KEYS:
            key = f"{key:.100}"
            near = difflib.get_close_matches(key, KEYS, 1, 0.0)[0]
            raise RecipeError(f"{where}: unknown key {key}, the nearest known key is {near}")
        else:
            flat[key] = convert(key, value, KEYS[key])
    return flat


def _build(flat: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {}
    # Short keys first: an empty section comes before the keys that an override puts into it.
    for key in sorted(flat, key=lambda key: key.count(".")):
        place = tree
        *path, name = key.split(".")
        for section in path:
            place = place.setdefault(section, {})
        place[name] = flat[key]
    sections: dict[str, Any] = {name: cls(**tree.pop(name, {})) for name, cls in SECTIONS.items()}
    recipe = Recipe(**sections, **tree)
    check_grow(recipe)
    return recipe
