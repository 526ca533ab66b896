"""The points of a sweep: every combination of the values of its keys."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepfast.mt.sweep.runs import Run
from deepfast.mt.training import Recipe, RecipeError, load_recipe

DECIDED = {"train.seed": "--seeds", "output": "--output", "resume": "--output"}
"""Keys that a sweep sets itself, and the option that decides them."""
PAIRS = {"[": "]", "{": "}"}
LONGEST = 100
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Over:
    """A key of recipes and the values that it takes, as texts of YAML."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One combination of values."""

    overs: tuple[Over, ...]
    values: tuple[str, ...]
    """A value for each of ``overs``."""

    @property
    def overrides(self) -> list[str]:
        return [f"{over.key}={v}" for over, v in zip(self.overs, self.values, strict=True)]

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

    def numbers(self, recipe: Recipe) -> list[float | None]:
        """Each value as the recipe reads it; None for one that is no number."""
        found: list[float | None] = []
        for over in self.overs:
            value: Any = recipe.to_dict()
            for part in over.key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            # In Python True is a number.
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            found.append(value if plain else None)
        return found


def parse_over(text: str) -> Over:
    """A key and its values from "KEY=VALUE,VALUE".

    Commas inside brackets, braces and quotes separate nothing, so a value may be a list or keys and
    values: ``optim.betas=[0.9, 0.98],[0.9, 0.999]``.

    Raises:
        RecipeError: no key, no value, a value twice, or a key that the sweep decides.
    """
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise RecipeError(
            f"--over: expected KEY=VALUE,VALUE, such as model.encoder_layers=6,12, got {text!r}"
        )
    if key in DECIDED:
        raise RecipeError(f"--over: expected another key than {key}, which {DECIDED[key]} decides")
    values = _split(rest)
    for value in values:
        if not value:
            raise RecipeError(f"--over {key}: expected values between the commas, got {rest!r}")
        if values.count(value) > 1:
            raise RecipeError(f"--over {key}: expected each value once, got {value} twice")
    return Over(key, tuple(values))


def _split(text: str) -> list[str]:
    """The parts between the commas outside of brackets, braces and quotes."""
    parts, open_, quote = [""], [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in PAIRS:
            open_.append(PAIRS[letter])
        elif open_ and letter == open_[-1]:
            open_.pop()
        elif letter == "," and not open_:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def points(overs: Sequence[Over]) -> list[Point]:
    """Every combination; the last key changes first.

    Raises:
        RecipeError: a key that stands twice.
    """
    keys = [over.key for over in overs]
    for key in keys:
        if keys.count(key) > 1:
            raise RecipeError(f"--over: expected each key once, got {key} twice")
    return [
        Point(tuple(overs), values)
        for values in itertools.product(*(over.values for over in overs))
    ]


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
        if any(key == over.key for over in chosen[0].overs):
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
        found[point] = [
            Run(point.name, load_recipe(recipe, [*given, f"train.seed={seed}"]),
                folder / point.folder / f"seed-{seed}")
            for seed in range(1, seeds + 1)
        ]  # fmt: skip
    return found
