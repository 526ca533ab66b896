"""The points of a sweep, its pilots, and the runs of each.

A point is a combination of the values of ``--over``, or a system of the recipe's section `sweep`::

    sweep:
      seeds: 3                       # runs of each system; default 1
      pilots:                        # optional: each system takes the value with the lowest dev NLL
        key: optim.lr
        values: [1e-3, 2e-3, 4e-3]
        steps: 500                   # of one short run for each value, with the first seed
      systems:                       # the first is the baseline
        pre-norm: {}
        DLCL: {model: {encoder_connection: dlcl}}
        post-norm: {model: {norm: post}, seeds: 1}
        slow: {optim: {lr: 1e-4}}             # has its own value, so no pilots
        Deep-Att: {recipe: phrases-fflstm}    # model and rates of another recipe
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepfast.checks import is_whole
from deepfast.files import require
from deepfast.mt.sweep.runs import Result, Run, seeded
from deepfast.mt.training import RecipeError, load_recipe
from deepfast.mt.training.errors import expect
from deepfast.mt.training.recipe_file import read_recipe_file

LONGEST = 100
"""Characters of a folder's name."""
SYSTEM = "system"
"""What stands above the names of systems."""
DECIDED = {"train.seed": "--seeds", "output": "--output", "resume": "--output", SYSTEM: "--only"}
"""Keys that a sweep sets itself, and the option that decides them."""


@dataclass(frozen=True)
class Point:
    """One combination of values, or one system: a line of the table."""

    changes: tuple[tuple[str, str], ...]
    """Every key of the sweep, and its value as text of YAML; `SYSTEM` has the name of a system."""
    own: tuple[str, ...] = ()
    """Overrides of a system."""
    recipe: str | None = None
    """The recipe of a system's model and rates; None: the sweep's."""
    seeds: int | None = None
    """Runs of a system; None: as many as of the others."""

    @property
    def overrides(self) -> list[str]:
        plain = [f"{key}={value}" for key, value in self.changes if key != SYSTEM]
        return [*self.own, *plain]

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.changes]

    @property
    def values(self) -> list[str]:
        return [value for _, value in self.changes]

    @property
    def name(self) -> str:
        return ", ".join(
            value if key == SYSTEM else f"{key}={value}" for key, value in self.changes
        )

    @property
    def folder(self) -> str:
        """A name that a shell takes as one word. Where letters were replaced in values, a digest
        keeps different points apart."""
        text = self.name.replace(", ", ",")
        if SYSTEM in self.keys:
            text = text.replace(" ", "-")
        plain = re.sub(r"[^\w.,=+-]+", "_", text)[:LONGEST]
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return plain if plain == text else f"{plain}-{digest}"

    def having(self, key: str, value: str) -> Point:
        """This point with one more key."""
        return replace(self, changes=(*self.changes, (key, value)))

    def choosing(self, pilot: Point) -> Point:
        """This point with the last key of one of its pilots, under its own name."""
        return replace(self, own=(*self.own, "=".join(pilot.changes[-1])))


@dataclass(frozen=True)
class Pilots:
    """Short runs that choose one value of a key for each point."""

    key: str
    values: tuple[str, ...]
    steps: int

    def of(self, point: Point) -> list[Point]:
        """The pilots of a point; none where it has its own value."""
        given = {key: json.loads(value) for key, value in (x.split("=", 1) for x in point.own)}
        if _holds(given, self.key):
            return []
        return [point.having(self.key, value) for value in self.values]

    def best(self, results: Mapping[Point, Sequence[Result]]) -> Point | None:
        """The pilot with the lowest dev NLL; None where none has one."""
        found = {
            pilot: run["nll"]
            for pilot, runs in results.items()
            for run in runs
            if run.get("nll") is not None
        }
        return min(found, key=found.__getitem__, default=None)


def points(overs: Sequence[str]) -> list[Point]:
    """Every combination of the values in texts "KEY=VALUE,VALUE"; the last key changes first.

    Commas inside brackets, braces and quotes separate nothing, so a value may be a list or keys and
    values: ``optim.betas=[0.9, 0.98],[0.9, 0.999]``.

    Raises:
        RecipeError: no key, no value, a key or a value twice, or a key that the sweep decides.
    """
    changes: dict[str, list[tuple[str, str]]] = {}
    for text in overs:
        key, equals, rest = text.partition("=")
        key = key.strip()
        example = "KEY=VALUE,VALUE, such as model.encoder_layers=6,12"
        expect(bool(equals and key), "--over", example, text)
        _undecided("--over", key)
        if key in changes:
            raise RecipeError(f"--over: expected each key once, got {key} twice")
        values = _split(rest)
        expect(bool(values), f"--over {key}", "values between the commas", rest)
        for value in values:
            if values.count(value) > 1:
                raise RecipeError(f"--over {key}: expected each value once, got {value} twice")
        changes[key] = [(key, value) for value in values]
    found = [Point(combination) for combination in itertools.product(*changes.values())]
    folders = {point.folder for point in found}
    expect(len(folders) == len(found), "--over", "values that differ in more than spaces", overs)
    return found


def _undecided(where: str, key: str) -> None:
    if key in DECIDED:
        raise RecipeError(f"{where}: expected another key than {key}, which {DECIDED[key]} decides")


def _split(text: str) -> list[str]:
    """The elements of a list of YAML, as they are written; none if it is not such a list."""
    yaml = require("yaml", "reading the values of a sweep")
    text = f"[{text}]"
    try:
        found = yaml.compose(text, yaml.SafeLoader).value
    except (yaml.YAMLError, RecursionError):
        return []
    return [text[each.start_mark.index : each.end_mark.index] for each in found]


def _holds(given: Any, key: str) -> bool:
    """Whether nested dictionaries, of which some have dotted keys, set a key."""
    return isinstance(given, dict) and any(
        name == key or (key.startswith(f"{name}.") and _holds(below, key[len(name) + 1 :]))
        for name, below in given.items()
    )


def named(chosen: Sequence[Point], names: Sequence[str]) -> list[Point]:
    """The points with these names; all for none."""
    known = {point.name: point for point in chosen}
    for name in names:
        expect(name in known, "--only", f"one of {', '.join(known)}", name)
    return [point for name, point in known.items() if not names or name in names]


def systems(recipe: str) -> tuple[list[Point], int, Pilots | None]:
    """The systems of a recipe's section `sweep`, the runs of each, and the pilots.

    Raises:
        RecipeError: the recipe has no such section, or it cannot be used.
    """
    section = read_recipe_file(recipe)[0].get("sweep")
    if section is None:
        raise RecipeError(
            f"{recipe}: expected a section sweep, or --over KEY=VALUE,VALUE, got neither"
        )
    _keys(f"{recipe}: sweep", section, ("systems", "seeds", "pilots"))
    given = section.get("systems")
    expect(isinstance(given, dict) and bool(given), "sweep.systems", "names with their keys", given)
    found = [
        _system(str(name), {} if changes is None else changes) for name, changes in given.items()
    ]
    same = {point.folder for point in found}
    expect(
        len(same) == len(found),
        "sweep.systems",
        "names that differ in more than a space and a hyphen",
        given,
    )
    taken = [name for name in same if name in ("plan", "pilots") or name.startswith((".", "sweep"))]
    other = "names other than plan and pilots that begin with neither a dot nor sweep"
    expect(not taken, "sweep.systems", other, taken)
    seeds = section.get("seeds", 1)
    expect(is_whole(seeds) and seeds > 0, "sweep.seeds", "an integer of at least 1", seeds)
    return found, seeds, _pilots(section.get("pilots"))


def _keys(where: str, value: Any, known: Sequence[str]) -> None:
    expect(isinstance(value, dict), where, f"keys among {', '.join(known)}", value)
    unknown = [key for key in value if key not in known]
    expect(not unknown, where, f"keys among {', '.join(known)}", unknown[:1])


def _system(name: str, changes: Any) -> Point:
    expect(name.isprintable(), "sweep.systems", "names of one line", name)
    where = f"sweep.systems.{name}"
    expect(isinstance(changes, dict), where, "keys and values of a recipe", changes)
    changes = dict(changes)
    recipe, seeds = changes.pop("recipe", None), changes.pop("seeds", None)
    expect(recipe is None or isinstance(recipe, str), f"{where}.recipe", "a recipe's name", recipe)
    fits = seeds is None or (is_whole(seeds) and seeds > 0)
    expect(fits, f"{where}.seeds", "an integer of at least 1", seeds)
    for key in DECIDED:
        if _holds(changes, key):
            _undecided(where, key)
    try:
        own = tuple(f"{key}={json.dumps(value)}" for key, value in changes.items())
    except TypeError:
        expect(False, where, "text, numbers, lists and keys with values", changes)
    return Point(((SYSTEM, name),), own, recipe, seeds)


def _pilots(given: Any) -> Pilots | None:
    if given is None:
        return None
    _keys("sweep.pilots", given, ("key", "values", "steps"))
    key, values, steps = (given.get(name) for name in ("key", "values", "steps"))
    expect(isinstance(key, str), "sweep.pilots.key", "a key of a recipe, such as optim.lr", key)
    _undecided("sweep.pilots.key", key)
    fits = isinstance(values, list) and len(values) > 1
    texts = [
        value if isinstance(value, str) else json.dumps(value, default=str)
        for value in (values if fits else ())
    ]
    fits = fits and len({*texts}) == len(texts)
    expect(fits, "sweep.pilots.values", "a list of two different values or more", values)
    expect(is_whole(steps) and steps > 0, "sweep.pilots.steps", "an integer of at least 1", steps)
    return Pilots(key, tuple(texts), steps)


def runs_of(
    recipe: str, overrides: Sequence[str], chosen: Sequence[Point], seeds: int, folder: Path | None
) -> dict[Point, list[Run]]:
    """The runs of every point, one for each seed, in folders of ``folder``; for None that is the
    recipe's output with "-sweep" at its end.

    A run translates the test part, if there is one, unless an override says otherwise.

    Raises:
        RecipeError: a value or an override that a recipe refuses; or nothing to validate or test.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in DECIDED:
            raise RecipeError(f"{key}: expected no override, {DECIDED[key]} decides it")
        if key in chosen[0].keys:
            raise RecipeError(f"{key}: expected no override, --over or sweep.pilots sets it")
    found = {}
    for point in chosen:
        given = [*overrides, *point.overrides]
        if point.recipe is not None:
            # Text and steps are those of all systems.
            shared = load_recipe(recipe, overrides).to_dict()
            common = [
                f"{section}.{key}={json.dumps(value)}"
                for section in ("data", "train")
                for key, value in shared[section].items()
            ]
            given = [*common, *given]
        plain = load_recipe(point.recipe or recipe, given)
        said = [
            text
            for text in (*overrides, *point.overrides)
            if re.match(r"train(\.|=.*\b)test_bleu\b", text)
        ]
        if plain.data.tests and not said:
            given.append("train.test_bleu=true")
        if not (plain.data.validates or plain.data.tests):
            raise RecipeError(
                f"{recipe}: expected dev or test pairs to compare runs by, got neither"
            )
        base = plain if point.recipe is None else load_recipe(recipe, overrides)
        folder = folder or Path(f"{base.output}-sweep")
        runs = seeded(
            point.name, point.recipe or recipe, given, point.seeds or seeds, folder / point.folder
        )
        found[point] = runs
    return found
