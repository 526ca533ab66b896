"""The code of a method, by which its formula is known."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

PACKAGES = ("torch", "transformers")
"""Their decorators of a forward leave its arguments and its results as they are."""


@functools.cache
def definition(function: Callable) -> ast.FunctionDef | None:
    """The code of ``function`` without its docstring, or None where it cannot be read."""
    while hasattr(function, "__wrapped__"):
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in PACKAGES:
            return None
        function = function.__wrapped__
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        # It is compiled, was typed into an interpreter, or is a lambda.
        return None
    if not isinstance(found, ast.FunctionDef):
        return None
    if ast.get_docstring(found) is not None:
        del found.body[0]
    return found


def text(code: ast.FunctionDef) -> str:
    """The statements, spelled in one way and without comments."""
    return "\n".join(map(ast.unparse, code.body))
