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
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from deepfast.checks import is_whole
from deepfast.mt.checked import Count, Field, Options, checked
from deepfast.mt.training import RecipeError
from deepfast.mt.training.errors import expect
from deepfast.mt.training.recipe_file import parse_yaml, read_recipe_file


@dataclass(frozen=True)
class Point:
    """A system, or a combination of values."""

    name: str
    overrides: tuple[str, ...] = ()
    """Of the recipe."""
    seeds: int = 1
    """How many runs, with the seeds from 1."""
    steps: int | None = None
    """Of a short run; None: the recipe's."""
    pilots: tuple[Point, ...] = ()
    """Short runs of this point with each value that they try, the last of their overrides."""

    @property
    def folder(self) -> str:
        """A name that a shell takes as one word. Where letters were replaced, a digest keeps
        different points apart."""
        text = self.name.replace(", ", ",").replace(" ", "-")
        plain = re.sub(r"[^\w.,=+-]+", "_", text)[:100]
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        # A name of dots alone is that of another folder, and no name is that of the sweep's.
        return plain if plain == text and text.strip(".") else f"{plain}-{digest}"

    def each(self, key: str, values: Sequence[Any]) -> list[Point]:
        """The point with each value of a key."""
        texts = [value if isinstance(value, str) else _text(key, value) for value in values]
        return [
            replace(
                self,
                name=", ".join(filter(None, (self.name, f"{key}={text}"))),
                overrides=(*self.overrides, f"{key}={text}"),
            )
            for text in texts
        ]


@checked("sweep.pilots.", RecipeError)
class Pilots:
    """Short runs that choose one value of a key for each system."""

    key: str
    values: Annotated[list[Any], Field(min_length=2, description="a list of two values or more")]
    steps: Count


@checked("sweep.", RecipeError)
class Section:
    """The section `sweep` of a recipe."""

    systems: Annotated[dict[str, Options], Field(min_length=1, description="names with their keys")]
    seeds: Count = 1
    pilots: Options = field(default_factory=dict)


def points(overs: Sequence[str]) -> list[Point]:
    """Every combination of the values in texts "KEY=VALUE,VALUE"; the last key changes first.

    The values are elements of a list of YAML: ``optim.betas=[0.9, 0.98],[0.9, 0.999]`` has two.

    Raises:
        RecipeError: no key or no value.
    """
    found = [Point("")]
    for text in overs:
        key, _, values = text.partition("=")
        listed = parse_yaml(f"[{values}]", f"--over {text:.100}")
        example = "KEY=VALUE,VALUE, such as model.encoder_layers=6,12"
        expect(bool(key and listed), "--over", example, text)
        found = [new for point in found for new in point.each(key, listed)]
    return found


def systems(recipe: str) -> list[Point]:
    """The systems of a recipe's section `sweep`.

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
        texts = [f"{key}={_text(f'sweep.systems.{name}', value)}" for key, value in changes.items()]
        keys = set(_dotted(changes))
        # The fields of another kind of model are others.
        own = [*["model=null"] * ("model.kind" in keys), *texts]
        point = Point(name, tuple(own), seeds)
        if pilots is not None and pilots.key not in keys:
            short = replace(point, seeds=1, steps=pilots.steps)
            point = replace(point, pilots=tuple(short.each(pilots.key, pilots.values)))
        found.append(point)
    return found


def named(chosen: Sequence[Point], names: Sequence[str]) -> list[Point]:
    """The points with these names; all for none."""
    known = {point.name: point for point in chosen}
    for name in names:
        expect(name in known, "--only", f"one of {', '.join(known)}", name)
    return [point for name, point in known.items() if not names or name in names]


def _text(key: str, value: Any) -> str:
    """A value as YAML in one line."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{key}: expected numbers, text, lists and keys ({error})") from error


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of nested dictionaries, of which some have dotted keys."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
