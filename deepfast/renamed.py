"""Names that changed before version 0.1: old recipes and configs are converted, and an error about
an old name says the new one."""

import functools
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

Called = TypeVar("Called", bound=Callable)

OPTIONS = {
    "heads": "num_heads",
    "norm_kind": "norm_type",
    "weight": "weight_type",
    "weights": "score_function",
    "norm_weight": "norm_affine",
}
"""Old key of a model's or a connection's options -> its name now."""

POLICIES = {
    "keep": "none",
    "lean": "ffn",
    "leaner": "ffn+qkv",
    "states": "layer",
    "history": "layer+input",
}
"""Old name of a recompute policy -> its name now."""

KEYS = OPTIONS | {"memory": "recompute or memory_budget"}
"""Old key of a recipe -> the new name, for the error message."""


def hint(value: object, allowed: Collection[object]) -> str:
    """The end of an error about ``value`` where it is the old name of one of the allowed values."""
    now = POLICIES.get(value) if isinstance(value, str) else None
    return f", which is now {now!r}" if now is not None and now in allowed else ""


def names_arguments(call: Called) -> Called:
    """Decorates a public function, or a constructor that public classes may share. An error about
    an unknown argument then has the public name and, for an old argument, the new one."""

    @functools.wraps(call)
    def called(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            found = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in kwargs:
                raise
            name = type(args[0]).__name__ if call.__name__ == "__init__" else call.__name__
            now = (OPTIONS | {"memory": "recompute"}).get(found[1])
            now = f", which is now {now}" if now else ""
            raise TypeError(f"{name}() {found[0]}{now}") from None

    return cast(Called, called)


def options(old: dict[str, Any]) -> dict[str, Any]:
    """Replaces old option names by the current ones, also in nested dicts."""
    return {
        OPTIONS.get(key, key): options(value) if isinstance(value, dict) else value
        for key, value in old.items()
    }


def recipe(old: dict[str, Any]) -> dict[str, Any]:
    """Replaces the old names in the recipe of a version 1 checkpoint by the current ones."""
    found = options(old)
    memory = found.pop("memory", None)
    if memory in POLICIES:
        found["recompute"] = POLICIES[memory]
    elif memory is not None:
        found["memory_budget"] = memory
    return found
