"""The points of a sweep: every combination of the values of its keys."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.files import require
from deepfast.mt.sweep.runs import Run, seeded
from deepfast.mt.training import RecipeError, load_recipe
from deepfast.mt.training.errors import expect

DECIDED = {"train.seed": "--seeds", "output": "--output", "resume": "--output"}
"""Keys that a sweep sets itself, and the option that decides them."""
LONGEST = 100
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Point:
    """One combination of values: a line of the table."""

    changes: tuple[tuple[str, str], ...]
    """Every key of the sweep, and its value as text of YAML."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.changes]

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.changes]

    @property
    def values(self) -> list[str]:
        return [value for _, value in self.changes]

    @property
    def name(self) -> str:
        return ", ".join(self.overrides)

    @property
    def folder(self) -> str:
        """A name that a shell takes as one word. Where letters were replaced, a digest keeps
        different points apart."""
        text = ",".join(self.overrides)
        plain = re.sub(r"[^\w.,=+-]+", "_", text)[:LONGEST]
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return plain if plain == text else f"{plain}-{digest}"


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
        if key in DECIDED:
            raise RecipeError(
                f"--over: expected another key than {key}, which {DECIDED[key]} decides"
            )
        if key in changes:
            raise RecipeError(f"--over: expected each key once, got {key} twice")
        values = _split(rest)
        expect(bool(values), f"--over {key}", "values between the commas", rest)
        for value in values:
            if values.count(value) > 1:
                raise RecipeError(f"--over {key}: expected each value once, got {value} twice")
        changes[key] = [(key, value) for value in values]
    return [Point(combination) for combination in itertools.product(*changes.values())]


def _split(text: str) -> list[str]:
    """The elements of a list of YAML, as they are written; none if it is not such a list."""
    yaml = require("yaml", "reading the values of a sweep")
    text = f"[{text}]"
    try:
        found = yaml.compose(text, yaml.SafeLoader).value
    except (yaml.YAMLError, RecursionError):
        return []
    return [text[each.start_mark.index : each.end_mark.index] for each in found]


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
            raise RecipeError(f"{key}: expected either an override or --over, got both")
    found = {}
    for point in chosen:
        given = [*overrides, *point.overrides]
        plain = load_recipe(recipe, given)
        if plain.data.tests and not any(text.startswith("train.test_bleu=") for text in given):
            given.append("train.test_bleu=true")
        if not (plain.data.validates or plain.data.tests):
            raise RecipeError(
                f"{recipe}: expected dev or test pairs to compare runs by, got neither"
            )
        folder = folder or Path(f"{plain.output}-sweep")
        found[point] = seeded(point.name, recipe, given, seeds, folder / point.folder)
    return found
