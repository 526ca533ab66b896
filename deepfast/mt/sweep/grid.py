"""The points of a sweep: the lines of its table.

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
        slow: {optim: {lr: 1e-4}}    # has its own value, so no pilots
        Deep-Att: {model: {kind: fast_forward_lstm, dim: 96}}   # another kind: a whole section
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from deepfast.checks import is_whole
from deepfast.files import require
from deepfast.mt.checked import Count, Field, Options, checked
from deepfast.mt.training import RecipeError
from deepfast.mt.training.errors import expect
from deepfast.mt.training.recipe_file import read_recipe_file

LONGEST = 100
"""Characters of a folder's name."""
SYSTEM = "system"
"""What stands above the names of systems."""


@dataclass(frozen=True)
class Point:
    """One combination of values, or one system: a line of the table."""

    changes: tuple[tuple[str, str], ...]
    """Every key of the sweep, and its value as text of YAML; `SYSTEM` has the name of a system."""
    own: tuple[str, ...] = ()
    """Overrides of a system."""
    seeds: int = 1
    """How many runs, with the seeds from 1."""
    pilots: tuple[Point, ...] = ()
    """This point with each value that its pilots try, the last of its changes."""

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
        """A name that a shell takes as one word. Where letters were replaced, a digest keeps
        different points apart."""
        text = re.sub(", *", ",", self.name).replace(" ", "-")
        plain = re.sub(r"[^\w.,=+-]+", "_", text)[:LONGEST]
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return plain if plain == text else f"{plain}-{digest}"


@checked("sweep.pilots.", RecipeError)
class Pilots:
    """Short runs that choose one value of a key for each system."""

    key: str
    values: Annotated[list[Any], Field(min_length=2, description="a list of two values or more")]
    steps: Count

    def of(self, point: Point) -> tuple[Point, ...]:
        """The point with each of the values."""
        texts = [value if isinstance(value, str) else json.dumps(value) for value in self.values]
        return tuple(replace(point, changes=(*point.changes, (self.key, text))) for text in texts)


@checked("sweep.", RecipeError)
class Section:
    """The section `sweep` of a recipe."""

    systems: Annotated[dict[str, Options], Field(min_length=1, description="names with their keys")]
    seeds: Count = 1
    pilots: Options = field(default_factory=dict)


def points(overs: Sequence[str]) -> list[Point]:
    """Every combination of the values in texts "KEY=VALUE,VALUE"; the last key changes first.

    Commas inside brackets, braces and quotes separate nothing, so a value may be a list or keys and
    values: ``optim.betas=[0.9, 0.98],[0.9, 0.999]``.

    Raises:
        RecipeError: no key or no value.
    """
    changes: dict[str, dict[str, None]] = {}
    for text in overs:
        key, _, values = text.partition("=")
        key, found = key.strip(), _split(values)
        example = "KEY=VALUE,VALUE, such as model.encoder_layers=6,12"
        expect(bool(key and found), "--over", example, text)
        changes.setdefault(key, {}).update(dict.fromkeys(found))
    pairs = ([(key, value) for value in values] for key, values in changes.items())
    return [Point(found) for found in itertools.product(*pairs)]


def systems(recipe: str) -> tuple[list[Point], Pilots | None]:
    """The systems of a recipe's section `sweep`, and the pilots.

    Raises:
        RecipeError: the recipe has no such section, or it cannot be used.
    """
    given = read_recipe_file(recipe)[0].get("sweep")
    if given is None:
        raise RecipeError(
            f"{recipe}: expected a section sweep, or --over KEY=VALUE,VALUE, got neither"
        )
    expect(isinstance(given, dict), "sweep", "keys and values", given)
    section, found = Section(**given), []
    pilots = Pilots(**section.pilots) if section.pilots else None
    for name, changes in section.systems.items():
        where, seeds = f"sweep.systems.{name}.seeds", changes.pop("seeds", section.seeds)
        expect(is_whole(seeds) and seeds > 0, where, "an integer of at least 1", seeds)
        keys = set(_dotted(changes))
        # The fields of another kind of model are others.
        own = ["model=null"] if "model.kind" in keys else []
        own += [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        point = Point(((SYSTEM, name),), tuple(own), seeds)
        tries = pilots is not None and pilots.key not in keys
        found.append(replace(point, pilots=pilots.of(point)) if tries else point)
    return found, pilots


def named(chosen: Sequence[Point], names: Sequence[str]) -> list[Point]:
    """The points with these names; all for none."""
    known = {point.name: point for point in chosen}
    for name in names:
        expect(name in known, "--only", f"one of {', '.join(known)}", name)
    return [point for name, point in known.items() if not names or name in names]


def best(tried: Mapping[Point, Mapping[str, Any]]) -> Point | None:
    """The pilot with the lowest dev NLL; None where none has one."""
    found = {pilot: run["nll"] for pilot, run in tried.items() if run.get("nll") is not None}
    return min(found, key=found.__getitem__, default=None)


def _split(text: str) -> list[str]:
    """The elements of a list of YAML, as they are written; none if it is not such a list."""
    yaml = require("ruamel.yaml", "reading the values of a sweep")
    text = f"[{text}]"
    try:
        found = yaml.YAML(typ="safe", pure=True).compose(text).value
    except (yaml.error.YAMLError, RecursionError):
        return []
    return [text[each.start_mark.index : each.end_mark.index] for each in found]


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of nested dictionaries, of which some have dotted keys."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
