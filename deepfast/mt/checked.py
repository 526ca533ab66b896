"""Checked dataclasses: the sections of recipes and the configs of models.

The annotation of a field is its check: a type, and limits by pydantic's `Field`. Types are strict:
true is not an integer, and the text "no" is not false. An integer may stand for a float, which must
be finite. A mistake is one sentence: the key, what is expected, and the value.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Annotated, Any, TypeVar, dataclass_transform

from deepfast.checks import shown
from deepfast.files import require

pydantic = require("pydantic", "the translation toolkit")

Field, BeforeValidator = pydantic.Field, pydantic.BeforeValidator
STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def one_of(names: Iterable[str]) -> Any:
    """The annotation of text that is one of these names."""
    literal = {"type": "literal", "expected": [*names]}
    return pydantic.GetPydanticSchema(lambda source, handler: literal)


Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Layers = Annotated[int, Field(ge=1, le=2**16)]
"""Tables grow with such a number; no model comes near the limit."""
Width = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A tensor of more channels would have more elements than an int64 counts."""
Positive = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)")]
Options = Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)]
"""Keys with values; null stands for none."""

NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "keys and values",
    "array": "a list",
    "null": "null",
}
LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}
"""Words for the keywords of a JSON schema."""

T = TypeVar("T")


class Checked:
    """Base of the checked dataclasses, for what must fit together."""

    def expect(self, condition: object, key: str, expected: str) -> None:
        """Refuses the value of a field, in `__post_init__`, if the condition does not hold."""
        if not condition:
            raise ValueError(f"{key}: expected {expected}, got {shown(getattr(self, key))}")


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def checked(
    owner: str, error: type[ValueError] = ValueError, frozen: bool = False
) -> Callable[[type[T]], type[T]]:
    """Makes a class a dataclass that checks its values.

    Args:
        owner: what an error's sentence has in front of the field's name.
        error: the class of the errors.
        frozen: whether the values are final, so that an object is hashable.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = pydantic.dataclasses.dataclass(kw_only=True, frozen=frozen, config=STRICT)(cls)
        check = made.__init__

        @functools.wraps(check)
        def init(self, **values):
            try:
                check(self, **values)
            except pydantic.ValidationError as mistakes:
                sentence = _sentence(made, values, mistakes.errors()[0])
                raise error(f"{owner}{sentence}") from None

        made.__init__ = init
        return made

    return decorate


def _sentence(cls: type, values: dict[str, Any], mistake: dict[str, Any]) -> str:
    if not mistake["loc"]:
        # `__post_init__` says it.
        return str(mistake["ctx"]["error"])
    schema = pydantic.TypeAdapter(cls).json_schema()
    place, value, path = schema, values, ""
    for key in mistake["loc"]:
        known = _keys(place, schema)
        if not known:
            break
        path += f".{key:.100}" if path else f"{key:.100}"
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"the nearest one is {near[0]}" if near else f"expected {', '.join(known)}"
            return f"{path}: unknown key, {hint}"
        place, value = known[key], value.get(key)
    return f"{path}: expected {_words(place)}, got {shown(value)}"


def _keys(place: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The keys that a place in a JSON schema names, each with its own place."""
    for each in place.get("anyOf", [place]):
        if "$ref" in each:
            each = schema["$defs"][each["$ref"].rpartition("/")[2]]
        if "properties" in each:
            return each["properties"]
    return {}


def _words(schema: dict[str, Any]) -> str:
    """What a JSON schema expects."""
    if "description" in schema:
        return schema["description"]
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    limits = [f"{words} {schema[name]}" for name, words in LIMITS.items() if name in schema]
    return " ".join([NOUNS[schema["type"]], " and ".join(limits)]).rstrip()
