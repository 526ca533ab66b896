"""Names that changed before version 0.1, for recipes and configs that were written before."""

from typing import Any

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
